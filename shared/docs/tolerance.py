"""How far apart correct ways of computing the same logits are, by data type, measured on the real model.

python -m shared.docs.tolerance --measure     writes results/tolerance.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from shared.errors import plain_errors
from shared.steps import ROOT, Step, list_steps, load_step

RESULTS = ROOT / "results" / "tolerance.json"
NEW_TOKENS = 8
DTYPES = ("float32", "bfloat16", "float16")
WAYS = {
    "cache": "from the blocks, against the whole sequence without a cache",
    "batch": "in a batch, against alone",
    "transformers": "our decoder, against transformers'",
}


def gathering_step() -> Step:
    """The last step that decodes a batch by gathering dense K and V: it runs in every data type."""
    return [step for step in list_steps() if hasattr(load_step(step), "gather_batch_kv")][-1]


def forced(module, model, prompts, answers):
    """Logits [len(prompts), NEW_TOKENS, vocab] when all prompts, together, are answered by these tokens."""
    import torch

    calls = []
    hook = model.register_forward_hook(lambda *call: calls.append(call[2].logits[:, -1].float().clone()))
    blocks = sum(-(-(len(prompt) + NEW_TOKENS) // 16) for prompt in prompts)
    runner = module.ModelRunner(model, num_blocks=blocks)
    for index, prompt in enumerate(prompts):
        runner.prefill(index, prompt)
    steps = [torch.cat(calls)]
    for i in range(NEW_TOKENS - 1):
        calls.clear()
        runner.decode_batch(list(range(len(prompts))), [answer[i] for answer in answers])
        steps.append(torch.cat(calls))
    hook.remove()
    return torch.stack(steps, dim=1)


def whole(model, prompt, answer):
    """The same logits [NEW_TOKENS, vocab] of one prompt, the whole sequence anew for every token."""
    import torch

    ids = [torch.tensor([prompt + answer[:i]]) for i in range(NEW_TOKENS)]
    return torch.stack([model(x, use_cache=False).logits[0, -1].float() for x in ids])


def at_once(model, prompt, answer):
    """The same from a model that gives the logits of all positions in one call."""
    import torch

    ids = torch.tensor([prompt + answer[:-1]])
    return model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()


def measure() -> dict:
    """Every data type and way, on the first four chat prompts, answered as float32 would."""
    import torch
    import transformers

    from shared.models import DEFAULT_MODEL, encode_prompts, load_tokenizer, resolve_model
    from shared.prompts import CHAT_PROMPTS

    transformers.utils.logging.disable_progress_bar()
    folder, step = resolve_model(DEFAULT_MODEL), gathering_step()
    module = load_step(step)
    prompts = encode_prompts(load_tokenizer(folder), CHAT_PROMPTS[:4])
    rows = []
    with torch.inference_mode():
        answers = module.generate(module.load_model(folder), prompts, NEW_TOKENS)
        for dtype in DTYPES:
            model = module.load_model(folder, dtype=getattr(torch, dtype))
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
            together = forced(module, model, prompts, answers)
            alone = torch.cat([forced(module, model, [p], [a]) for p, a in zip(prompts, answers)])
            anew = torch.stack([whole(model, p, a) for p, a in zip(prompts, answers)])
            reference = torch.stack([at_once(theirs, p, a) for p, a in zip(prompts, answers)])
            for way, (a, b) in {
                "cache": (alone, anew),
                "batch": (together, alone),
                "transformers": (anew, reference),
            }.items():
                rows.append(
                    {
                        "dtype": dtype,
                        "way": way,
                        "error": float((a - b).abs().max()),
                        "equal": int((a.argmax(-1) == b.argmax(-1)).sum()),
                        "tokens": len(prompts) * NEW_TOKENS,
                        "largest": float(b.abs().max()),
                    }
                )
    environment = {"model": DEFAULT_MODEL, "torch": torch.__version__, "transformers": transformers.__version__}
    return {"environment": environment, "step": step.slug, "rows": rows}


def render(path: Path = RESULTS) -> dict[str, str]:
    """The table, by path under docs/generated; it says so when nothing has been measured."""
    if not path.is_file():
        return {"tolerance.md": "Not measured yet.\n"}
    result = json.loads(path.read_text(encoding="utf-8"))
    lines = [
        "| data type | what is compared | largest difference of a logit | same best token |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        same = f"{row['equal']} of {row['tokens']}"
        lines.append(f"| {row['dtype']} | {WAYS[row['way']]} | {row['error']:.1g} | {same} |")
    environment = result["environment"]
    largest = max(row["largest"] for row in result["rows"])
    note = (
        f"{environment['model']} on the CPU, step {result['step'].split('_')[0]}, torch {environment['torch']}, "
        f"transformers {environment['transformers']}; the largest logit is {largest:.0f}."
    )
    return {"tolerance.md": "\n".join(lines) + f"\n\n{note}\n"}


@plain_errors()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m shared.docs.tolerance", description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help=f"measure again and write {RESULTS.relative_to(ROOT)}")
    if parser.parse_args(argv).measure:
        RESULTS.parent.mkdir(exist_ok=True)
        new = RESULTS.with_suffix(".json.new")
        new.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
        os.replace(new, RESULTS)
    print(render()["tolerance.md"], end="")


if __name__ == "__main__":
    main()
