"""What goes wrong in a left-padded batch without an attention mask or position ids, measured on the real model.

python -m shared.docs.padding --measure     writes results/padding.json
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
from itertools import product, takewhile
from pathlib import Path

from shared.errors import plain_errors
from shared.steps import ROOT

RESULTS = ROOT / "results" / "padding.json"
NEW_TOKENS = 32
SHORT = "What is the capital of France, and what is it known for?"
LONG = (
    "I have a loaf of bread, four eggs, some milk, butter, an onion, two tomatoes, a bag of rice and a tin of beans. "
    "Suggest one warm dinner for two people from these and say in which order to prepare it."
)
WAYS = {
    "prompts": "both prompts padded, and prefilled together",
    "histories": "each prompt prefilled alone, then its history padded, as steps 03 to 05 do",
}


def call(model, ids, cache, **kwargs):
    """The model's logits at the last position [batch, vocab]; `cache` goes in under this version's name for it."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(ids, logits_to_keep=1, **{name: cache}, **kwargs).logits[:, -1]


def alone(model, prompt):
    """A prompt's cache and the logits behind it [vocab], run without a neighbour."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    return cache, call(model, torch.tensor([prompt]), cache)[0]


def decode(model, cache, tokens, mask, position_ids, steps):
    """Greedy decoding of a batch behind its cache. Returns the short row's first logits and all its token ids.

    mask: [batch, columns so far] or None. position_ids: [batch, 1], the tokens' own positions, or None.
    """
    import torch

    first, ids = None, []
    for _ in range(steps):
        if mask is not None:
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
        logits = call(model, tokens[:, None], cache, attention_mask=mask, position_ids=position_ids)
        first = logits[0] if first is None else first
        tokens = logits.argmax(-1)
        position_ids = None if position_ids is None else position_ids + 1
        ids.append(int(tokens[0]))
    return first, ids


def padded(model, prompts, way, with_mask, with_positions):
    """The short prompt's logits after its first step in the padded batch, and its token ids from there on."""
    import torch
    from transformers import DynamicCache

    longest = max(map(len, prompts))
    lens = torch.tensor([len(p) for p in prompts])[:, None]
    real = torch.arange(longest) >= longest - lens
    mask = real.long() if with_mask else None
    next_positions = lens.clone() if with_positions else None
    cache = DynamicCache()
    if way == "prompts":
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        positions = (real.long().cumsum(1) - 1).clamp(min=0) if with_positions else None
        logits = call(model, ids, cache, attention_mask=mask, position_ids=positions)
        tokens = logits.argmax(-1)
        _, rest = decode(model, cache, tokens, mask, next_positions, NEW_TOKENS - 1)
        return logits[0], [int(tokens[0]), *rest]
    singles = [alone(model, prompt) for prompt in prompts]
    tokens = torch.stack([logits.argmax() for _, logits in singles])
    for layer, layers in enumerate(zip(*(single for single, _ in singles))):
        pad = torch.nn.functional.pad
        k, v = (torch.cat([pad(one[i], (0, 0, longest - one[i].shape[2], 0)) for one in layers]) for i in range(2))
        cache.update(k, v, layer)
    first, rest = decode(model, cache, tokens, mask, next_positions, NEW_TOKENS - 1)
    return first, [int(tokens[0]), *rest]


def measure() -> dict:
    """Both ways, with and without mask and position ids, against the short prompt alone."""
    import torch
    import transformers

    from shared.models import DEFAULT_MODEL, encode_prompts, end_tokens, load_tokenizer, resolve_model

    transformers.utils.logging.disable_progress_bar()
    folder = resolve_model(DEFAULT_MODEL)
    tokenizer = load_tokenizer(folder)
    prompts = encode_prompts(tokenizer, [SHORT, LONG])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ends = set(end_tokens(folder, tokenizer))

    def answer(ids):
        """The text up to where the model ended it."""
        return tokenizer.decode(list(takewhile(lambda i: i not in ends, ids)), skip_special_tokens=True)

    rows = []
    with torch.inference_mode():
        cache, after_prompt = alone(model, prompts[0])
        token = after_prompt.argmax()
        after_token, rest = decode(model, cache, token[None], None, None, NEW_TOKENS - 1)
        expected = {"prompts": after_prompt, "histories": after_token}
        expected_ids = [int(token), *rest]
        for way, (with_mask, with_positions) in product(WAYS, product((True, False), repeat=2)):
            logits, ids = padded(model, prompts, way, with_mask, with_positions)
            same = next((i for i, (a, b) in enumerate(zip(ids, expected_ids)) if a != b), NEW_TOKENS)
            rows.append(
                {
                    "way": way,
                    "mask": with_mask,
                    "position_ids": with_positions,
                    "logit_error": float((logits - expected[way]).abs().max()),
                    "equal_tokens": same,
                    "text": answer(ids),
                }
            )
    return {
        "environment": {
            "model": DEFAULT_MODEL,
            "dtype": "float32",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "prompt_lengths": [len(p) for p in prompts],
        "new_tokens": NEW_TOKENS,
        "prompt": SHORT,
        "alone": answer(expected_ids),
        "logit_spread": float(after_prompt.max() - after_prompt.min()),
        "rows": rows,
    }


def one_line(text: str) -> str:
    """Generated text as one line, with nothing in it that Markdown would read."""
    text = " ".join(text.split())
    return f"`{text.replace('`', chr(39))}`" if text else "(nothing)"


def table(result: dict, way: str) -> str:
    """One way's four rows as a Markdown table, and the four answers as a list behind it."""
    mark = {True: "yes", False: "no"}
    rows = [row for row in result["rows"] if row["way"] == way]
    lines = ["| mask | position ids | largest logit error | tokens before the first wrong one |", "|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {mark[row['mask']]} | {mark[row['position_ids']]} | {row['logit_error']:.1e} "
            f"| {row['equal_tokens']} of {result['new_tokens']} |"
        )
    lines.append("")
    for row in rows:
        passed = [name for name, key in (("mask", "mask"), ("position ids", "position_ids")) if row[key]]
        lines.append(f"- {' and '.join(passed) or 'neither'}: {one_line(row['text'])}")
    return "\n".join(lines)


def render(path: Path = RESULTS) -> dict[str, str]:
    """The tables, by path under docs/generated; they say so when nothing has been measured."""
    if not path.is_file():
        return {f"padding/{name}.md": "Not measured yet.\n" for name in (*WAYS, "setting")}
    result = json.loads(path.read_text(encoding="utf-8"))
    environment, lengths = result["environment"], result["prompt_lengths"]
    setting = (
        f"{environment['model']} in {environment['dtype']}, transformers {environment['transformers']}, "
        f"torch {environment['torch']}. Two prompts of {lengths[0]} and {lengths[1]} tokens; the short one is "
        f"“{result['prompt']}”. Alone, the model answers: {one_line(result['alone'])}. Its logits spread over "
        f"{result['logit_spread']:.0f}, so that one can judge the errors.\n"
    )
    return {f"padding/{way}.md": table(result, way) + "\n" for way in WAYS} | {"padding/setting.md": setting}


@plain_errors()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help=f"measure again and write {RESULTS.relative_to(ROOT)}")
    if parser.parse_args().measure:
        RESULTS.parent.mkdir(exist_ok=True)
        new = RESULTS.with_suffix(".json.new")
        new.write_text(json.dumps(measure(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(new, RESULTS)
    print("\n\n".join(render().values()))


if __name__ == "__main__":
    main()
