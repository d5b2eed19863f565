"""Tables of what six versions of transformers do with a cache, out of results/compat/*.json, and what the cache costs.

Measured by `python -m shared.compat` and `python -m shared.compat.cost --measure`.
"""

from __future__ import annotations

import inspect
import json
import statistics
from collections.abc import Callable, Iterable

from shared.compat import RESULTS, VERSIONS
from shared.steps import ROOT, code_hash, find_step, list_steps

NOT_MEASURED = "Not measured: `make compat` does it.\n"
CALLS = {
    "prefill": {
        "nothing": "`model(prompt)`: nothing passed",
        "empty": "`past_key_values=DynamicCache()`",
        "empty_as_cache": "`cache=DynamicCache()`",
        "empty_by_signature": "the same, under the name in the signature",
    },
    "decode": {
        "tuple": "a tuple of (k, v) per layer",
        "filled": "`past_key_values=` a `DynamicCache` filled by `update`",
        "filled_as_cache": "`cache=` the same",
        "filled_by_signature": "the same, under the name in the signature",
        "from_legacy_cache": "`DynamicCache.from_legacy_cache(tuple)`",
        "cache_of_tuple": "`DynamicCache(tuple)`",
    },
}
READS = {
    "iterate": "`list(cache)[l][0]`",
    "index": "`cache[l][0]`",
    "key_cache": "`cache.key_cache[l]`",
    "layers": "`cache.layers[l].keys`",
    "to_legacy_cache": "`cache.to_legacy_cache()[l][0]`",
}
COPIES = {
    "first_fill": "the first `update` copies what it is given",
    "each_step": "each further `update` copies the whole history",
}
PADDING = {
    "mask_and_positions": "mask and position ids",
    "mask_only": "mask only",
    "positions_only": "position ids only",
    "neither": "neither",
}
LOOKS = {
    "listen": "everything that is said",
    "raise_warnings": "with -W error",
    "raise_logged": "with a logging handler that raises",
}
FAMILY = "llama"


class Notes:
    """Letters for texts that do not fit into a cell, in order of first use."""

    def __init__(self):
        self.seen: dict[tuple[str, str], list[str]] = {}

    def letter(self, kind: str, text: str, version: str) -> str:
        versions = self.seen.setdefault((kind, text), [])
        if version not in versions:
            versions.append(version)
        return f"({chr(ord('a') + list(self.seen).index((kind, text)))})"

    def table(self) -> str:
        rows = [
            [f"({chr(ord('a') + i)})", kind, f"`` {text} ``", ", ".join(versions)]
            for i, ((kind, text), versions) in enumerate(self.seen.items())
        ]
        return markdown(["", "comes as", "text", "versions"], rows)


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def channel(message: dict) -> str:
    return "log record" if message["channel"].startswith("logger") else message["channel"]


def call_cell(found: dict, notes: Notes, version: str) -> str:
    """What a call gave, in a few words and letters."""
    letters = [notes.letter(channel(m), m["text"], version) for m in found["messages"]]
    if "error" in found:
        letters.append(notes.letter(found["error"]["type"], found["error"]["text"], version))
        return f"`{found['error']['type']}` {' '.join(dict.fromkeys(letters))}"
    if not found["logits_equal"]:
        outcome = "**wrong**, no error"
    elif found["cached"] != found["expected"]:
        outcome = "**cache ignored**"
    else:
        outcome = "right"
    if found["returns"] != "DynamicCache":
        outcome += f", returns a {found['returns']}"
    reading = [notes.letter(channel(m), m["text"], version) + " on reading the output" for m in found["reading"]]
    return " ".join([outcome, *dict.fromkeys(letters + reading)])


def calls(results: dict[str, dict], phase: str, notes: Notes) -> str:
    rows = [
        [label, *(call_cell(r["families"][FAMILY][phase][name], notes, v) for v, r in results.items())]
        for name, label in CALLS[phase].items()
    ]
    return markdown([phase, *results], rows)


def steps(results: dict[str, dict], notes: Notes) -> str:
    """Each step around the version's own Llama: the tokens, and every message on the way."""
    now = {step.slug: code_hash(step) for step in list_steps()}
    slugs = list(dict.fromkeys(slug for r in results.values() for slug in r["families"][FAMILY]["steps"]))
    rows = []
    for slug in slugs:
        row = [f"`{slug}`"]
        for version, result in results.items():
            found = result["families"][FAMILY]["steps"][slug]
            letters = [notes.letter(channel(m), m["text"], version) for m in found["messages"]]
            if "error" in found:
                outcome = f"`{found['error']['type']}`"
                letters.append(notes.letter(found["error"]["type"], found["error"]["text"], version))
            else:
                outcome = "right" if found["tokens_equal"] else "**wrong**"
                outcome += "" if letters else ", silent"
            outcome += "" if result["code_hashes"][slug] == now.get(slug) else " (older code)"
            row.append(" ".join([outcome, *dict.fromkeys(letters)]))
        rows.append(row)
    return markdown(["step", *results], rows)


def shown(results: dict[str, dict]) -> str:
    """What `--engine transformers` tells its user where a step cannot run, from the newest version."""
    found = next(reversed(results.values()))["families"][FAMILY]["steps"]
    texts = dict.fromkeys(step["shown"] for step in found.values() if "shown" in step)
    return "".join(f"```text\nerror: {text}\n```\n" for text in texts)


def reads(results: dict[str, dict]) -> str:
    def cell(found: dict) -> str:
        return f"`{found['error']['type']}`" if "error" in found else "yes" if found["equal"] else "**wrong**"

    families = {version: result["families"][FAMILY] for version, result in results.items()}
    rows = [[label, *(cell(f["reads"][name]) for f in families.values())] for name, label in READS.items()]
    rows += [["items per layer when iterating", *(str(f["copies"]["items_per_layer"]) for f in families.values())]]
    rows += [
        [label, *("yes" if f["copies"][name] else "no" for f in families.values())] for name, label in COPIES.items()
    ]
    return markdown(["layer `l`'s keys, and memory", *results], rows)


def padding(results: dict[str, dict], phase: str) -> str:
    def cell(found: dict) -> str:
        message = ", and a message" if found["messages"] else ""
        return ("right" if found["error"] < 1e-3 else f"**off by {found['error']:.1g}**") + message

    families = [result["families"][FAMILY] for result in results.values()]
    rows = [[label, *(cell(f["padding"][phase][name]) for f in families)] for name, label in PADDING.items()]
    return markdown(["passed", *results], rows)


def same_in_all_families(results: dict[str, dict]) -> str:
    """Whether the other families gave the same, but for numbers and the names of their classes."""
    names = dict.fromkeys(name for result in results.values() for name in result["families"])
    others = [name for name in names if name != FAMILY]
    different = [
        f"{name} in {version}"
        for version, result in results.items()
        for name in others
        if outline(result["families"][name], name) != outline(result["families"][FAMILY], FAMILY)
    ]
    if different:
        return f"The tables show {FAMILY.title()}; different: {', '.join(different)}.\n"
    return (
        f"The tables show {FAMILY.title()}. {', '.join(name.title() for name in others)} gave the same in every cell.\n"
    )


def outline(value: object, family: str) -> object:
    """A result without what may differ between families: sizes of errors, lines of code, class names."""
    if isinstance(value, dict):
        return {k: outline(v, family) for k, v in value.items() if k != "where"}
    if isinstance(value, list):
        return [outline(v, family) for v in value]
    if isinstance(value, float):
        return value < 1e-3
    return value.replace(family.title(), "*") if isinstance(value, str) else value


def environment(results: dict[str, dict]) -> str:
    rows = [
        [version, r["torch"], r["python"], f"`{r['families'][FAMILY]['cache_argument']}`"]
        for version, r in results.items()
    ]
    return markdown(["transformers", "torch", "Python", "cache argument in the signature"], rows)


# ---- the hunt


def hunt(found: dict[str, list[str]]) -> str:
    """One attempt's output under each way of looking, as it was printed."""
    parts = (f"{LOOKS[look]}:\n" + "".join(f"    {line}\n" for line in lines) for look, lines in found.items())
    return "```text\n" + "\n".join(parts) + "```\n"


def attempts() -> dict[str, Callable]:
    from shared.compat.hunt import ATTEMPTS

    return {attempt.__name__: attempt for attempt in ATTEMPTS}


# ---- what the cache object costs

COST = {
    "copy": "copy the same bytes once to new memory, for comparison",
    "gather": "gather the histories out of the blocks",
    "append_to_tuple": "append a token to the gathered tensors, as with a tuple",
    "fill": "fill an empty `DynamicCache` with them",
    "append": "append a token to the filled cache",
}


def cost() -> str:
    from shared.compat.cost import RESULTS as path

    if not path.is_file():
        return "Not measured: `python -m shared.compat.cost --measure` does it.\n"
    result = json.loads(path.read_text(encoding="utf-8"))
    env, rows = result["environment"], result["rows"]
    step = rows[0]["step"]
    old = "" if code_hash(find_step(step)) == rows[0]["code_hash"] else " **Measured on older code.**"
    histories = list(dict.fromkeys(row["history"] for row in rows))
    medians = {(row["part"], row["history"]): statistics.median(row["samples_ms"]) for row in rows}
    sizes = {row["history"]: row["bytes"] / 1e6 for row in rows}
    table = [
        [
            label,
            *(f"{medians[part, n]:.1f} ms, {medians[part, n] / medians['copy', n]:.1f} × copy" for n in histories),
        ]
        for part, label in COST.items()
    ]
    extra = {n: medians["fill", n] + medians["append", n] - medians["append_to_tuple", n] for n in histories}
    table.append(
        [
            "**what the cache object costs more than the tuple**: fill + append − append to the tuple",
            *(f"**{extra[n]:.1f} ms, {extra[n] / medians['copy', n]:.1f} × copy**" for n in histories),
        ]
    )
    head = ["in all layers together", *(f"{n} tokens ({sizes[n]:.0f} MB)" for n in histories)]
    samples = len(rows[0]["samples_ms"])
    return (
        f"**{env['cpu']}, {env['threads']} thread{'s' * (env['threads'] != 1)}, {env['model']}, {env['dtype']}, "
        f"batch {rows[0]['batch']}, gather of `{step}`, transformers {env['versions']['transformers']}.** "
        f"Medians of {samples} rounds; load average {env['load_before']:.1f} to {env['load_after']:.1f}.{old}\n\n"
        + markdown(head, table)
    )


def load() -> dict[str, dict]:
    """The measured versions, in order."""
    paths = {version: RESULTS / f"{version}.json" for version in VERSIONS}
    return {version: json.loads(path.read_text(encoding="utf-8")) for version, path in paths.items() if path.is_file()}


def render() -> dict[str, str]:
    """Path below docs/generated/ -> Markdown."""
    results, notes = load(), Notes()
    tables = {
        "prefill": lambda: calls(results, "prefill", notes),
        "decode": lambda: calls(results, "decode", notes),
        "steps": lambda: steps(results, notes),
        "messages": notes.table,  # after those that use letters
        "shown": lambda: shown(results),
        "reads": lambda: reads(results),
        "padding-prefill": lambda: padding(results, "prefill"),
        "padding-decode": lambda: padding(results, "decode"),
        "families": lambda: same_in_all_families(results),
        "environment": lambda: environment(results),
    }
    files = {f"compat/{name}.md": table() if results else NOT_MEASURED for name, table in tables.items()}
    for name, function in attempts().items():
        files[f"compat/hunt/{name}.md"] = f"```python\n{inspect.getsource(function)}```\n"
        for version in (VERSIONS[0], VERSIONS[-1]):
            found = results.get(version)
            files[f"compat/hunt/{name}.{version}.md"] = hunt(found["hunt"][name]) if found else NOT_MEASURED
    files["compat/cost.md"] = cost()
    return files


def main() -> None:
    for name, text in render().items():
        path = ROOT / "docs" / "generated" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
