"""Tables as Markdown fragments. Whatever was not measured says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shared.report.data import BASELINE, Report, Results

NOT_MEASURED = "not measured"
OLDER = "measured on older code"
PARTS = {
    "floor": "model floor",
    "attention": "attention",
    "gather": "gather",
    "write": "write",
    "cache": "cache copies",
    "rest": "rest",
}

Column = tuple[str, Callable[[dict], str]]


def figure(value: float | None, form: str = "{:.1f}") -> str:
    return NOT_MEASURED if value is None else form.format(value)


def tokens(row: dict) -> str:
    """How a row's tokens compare with the baseline's."""
    if row["tokens_equal"]:
        return "equal"
    where = row["first_difference"]
    if row["wrong"]:
        return f"**wrong** (request {where['request']}, position {where['position']})"
    margin = f", margin {row['margin']:.2g}" if "margin" in row else ""
    return f"differ from position {where['position']}{margin}"


END_TO_END: list[Column] = [
    ("tokens", tokens),
    ("tokens/s", lambda r: figure(r.get("tokens_per_s"))),
    ("× transformers", lambda r: figure(r.get("x_transformers"), "{:.2f}")),
    ("TTFT ms", lambda r: figure(r.get("ttft_ms"), "{:.0f}")),
    ("TPOT ms", lambda r: figure(r.get("tpot_ms"))),
    ("decode step ms", lambda r: spread(r, "decode_step_ms")),
    ("× transformers, decode", lambda r: figure(r.get("x_transformers_decode"), "{:.2f}")),
    ("runs", lambda r: str(r["repeats"])),
]


def spread(row: dict, name: str) -> str:
    """Median with the quartiles beside it."""
    if row.get(name) is None:
        return NOT_MEASURED
    return f"{row[name]:.1f} ({row[f'{name}_q1']:.1f} to {row[f'{name}_q3']:.1f})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are text and the others numbers."""
    line = lambda cells: "| " + " | ".join(cells) + " |"  # noqa: E731
    align = [":---" if i < left else "---:" for i in range(len(head))]
    return "\n".join([line(head), line(align), *map(line, rows)]) + "\n"


def by_variant(results: Results, variants: Sequence[str], columns: list[Column], suite: str, workload: str, batch: int):
    """One line a variant; variants without a row say so in every cell."""
    rows, notes = [], []
    for variant in variants:
        row = results.row(suite, variant, workload, batch)
        if row is None:
            rows.append([_name(variant), *[NOT_MEASURED] * len(columns)])
            continue
        mark = " †" if results.is_stale(row) else ""
        rows.append([_name(variant) + mark, *(value(row) for _, value in columns)])
        if mark and not notes:
            notes = [f"† {OLDER}"]
    return table(["variant", *(name for name, _ in columns)], rows) + "".join(f"\n{note}\n" for note in notes)


def sections(report: Report, body: Callable[[Results], str]) -> str:
    """`body` for every results file under a line that names its hardware; or one line that nothing was measured."""
    parts = [f"**{results.title}**\n\n{text}" for results in report.results if (text := body(results))]
    return "\n".join(parts) or f"{NOT_MEASURED.capitalize()}: there are no published results for this yet.\n"


def end_to_end(report: Report) -> str:
    def body(results: Results) -> str:
        return _workloads(results, report.variants, "chat", (1, 4, 8))

    return sections(report, body)


def mixed(report: Report) -> str:
    return sections(report, lambda results: _workloads(results, report.variants, "mixed", (8,)))


def history(report: Report) -> str:
    columns = [END_TO_END[0], *END_TO_END[5:7]]

    def body(results: Results) -> str:
        parts = []
        for workload in ("history-512", "history-2048"):
            for batch in (1, 8):
                if results.select("end_to_end", workload=workload, batch=batch):
                    title = f"{workload.split('-')[1]} tokens of history, batch {batch}\n\n"
                    parts.append(title + by_variant(results, report.variants, columns, "end_to_end", workload, batch))
        return "\n".join(parts)

    return sections(report, body)


def memory(report: Report) -> str:
    columns = [
        ("peak KV MB", lambda r: figure(_mega(r.get("peak_kv_bytes")))),
        ("peak memory MB", lambda r: figure(_mega(r.get("peak_memory_bytes")), "{:.0f}")),
    ]

    def body(results: Results) -> str:
        if not results.select("end_to_end", workload="chat", batch=8):
            return ""
        return by_variant(results, report.variants, columns, "end_to_end", "chat", 8)

    return sections(report, body)


def ladder(report: Report) -> str:
    columns = [END_TO_END[5], END_TO_END[6]]
    return sections(
        report,
        lambda results: (
            by_variant(results, report.variants, columns, "end_to_end", "chat", 8)
            if results.select("end_to_end", workload="chat", batch=8)
            else ""
        ),
    )


def where_time_goes(report: Report) -> str:
    columns = [
        ("whole step ms", lambda r: figure(r["total_ms"])),
        ("× reading all bytes once", lambda r: figure(r["total_ms"] / r["limit_ms"] if r.get("limit_ms") else None)),
        *((label, lambda r, part=part: figure(r[f"{part}_ms"])) for part, label in PARTS.items()),
    ]

    def body(results: Results) -> str:
        found = dict.fromkeys((row["workload"], row["batch"]) for row in results.select("decode_step"))
        return "\n".join(
            f"{workload}, batch {batch}\n\n"
            + by_variant(results, report.variants, columns, "decode_step", workload, batch)
            for workload, batch in found
        )

    return sections(report, body)


def sweep(suite: str, size: str, unit: str = "ms") -> Callable[[Report], str]:
    """A sweep's table: one line for each size and batch, one column a variant, GB/s beside each time."""
    scale = {"ms": 1.0, "µs": 1e3}[unit]

    def body(results: Results) -> str:
        rows = results.select(suite)
        variants = list(dict.fromkeys(row["variant"] for row in rows))
        points = sorted({(row["batch"], row["workload"]) for row in rows}, key=lambda p: (p[0], _size(p[1])))
        lines = []
        for batch, workload in points:
            cells = []
            for variant in variants:
                row = results.row(suite, variant, workload, batch)
                cells.append(NOT_MEASURED if row is None else f"{_short(row['ms'] * scale)} ({row['gb_per_s']:.1f})")
            lines.append([str(batch), str(_size(workload)), *cells])
        stale = {row["variant"] for row in rows if results.is_stale(row)}
        names = [_name(variant) + (" †" if variant in stale else "") for variant in variants]
        note = f"\n† {OLDER}\n" if stale else ""
        return f"{unit} (GB/s)\n\n" + table(["batch", size, *names], lines, left=0) + note if rows else ""

    return lambda report: sections(report, body)


def matmul(report: Report) -> str:
    def body(results: Results) -> str:
        rows = results.select("matmul")
        variants = list(dict.fromkeys(row["variant"] for row in rows))
        sizes = sorted({row["batch"] for row in rows})
        lines = []
        for size in sizes:
            found = [results.row("matmul", variant, "weights", size) for variant in variants]
            lines.append([str(size), *(f"{r['gb_per_s']:.1f} ({r['ms']:.1f})" if r else NOT_MEASURED for r in found)])
        return "GB/s (ms)\n\n" + table(["rows", *map(_name, variants)], lines, left=0) if rows else ""

    return sections(report, body)


def counts(report: Report) -> str:
    def body(results: Results) -> str:
        lines = []
        for variant in report.variants:
            cells = []
            for kind in ("write", "gather", "decode_step"):
                row = results.row("counts", variant, kind, 8)
                cells.append(f"{row['ops_all']} / {row['ops_non_view']}" if row else "—")
            lines.append([_name(variant), *cells])
        head = ["variant", "write one token, one layer", "gather", "decode step"]
        return table(head, lines) if results.select("counts") else ""

    return sections(report, body)


def laws(report: Report) -> str:
    def body(results: Results) -> str:
        lines = [
            [_name(variant), kind.replace("_", " "), f"`{row['law_all']}`", f"`{row['law_non_view']}`"]
            for variant in report.variants
            for kind in ("write", "gather", "decode_step")
            if (row := results.row("counts", variant, kind, 8))
        ]
        return table(["variant", "of", "all operators", "no views"], lines, left=4) if lines else ""

    # Counts are the same on every machine: one table is enough.
    first = next((text for results in report.results if (text := body(results))), None)
    return first or f"{NOT_MEASURED.capitalize()}: there are no published results for this yet.\n"


def cost_model(report: Report) -> str:
    def body(results: Results) -> str:
        calibration = next(iter(results.select("calibration")), None)
        if calibration is None:
            return ""
        lines = []
        for suite, time in (("write", "ms"), ("gather", "ms"), ("decode_step", "total_ms")):
            for row in results.select(suite):
                if "predicted_ms" in row:
                    what = f"{suite.replace('_', ' ')}, {row['workload']}, batch {row['batch']}"
                    cells = [_short(row[time]), _short(row["predicted_ms"]), f"{row['misfit']:.2f}"]
                    lines.append([_name(row["variant"]), what, *cells])
        parameters = (
            f"t0 = {calibration['t0_us']:.2f} µs an operator, copying {calibration['copy_gb_per_s']:.1f} GB/s "
            f"(read and written), reading {calibration['read_gb_per_s']:.1f} GB/s\n\n"
        )
        if kinds := calibration.get("kinds_us"):
            each = ", ".join(f"{name} {us:.2f}" for name, us in kinds.items())
            parameters += f"t0 is the mean of these kinds of operators, µs each: {each}\n\n"
        head = ["variant", "what", "measured ms", "predicted ms", "predicted / measured"]
        return parameters + table(head, lines, left=2)

    return sections(report, body)


def peers(report: Report) -> str:
    def body(results: Results) -> str:
        rows = sorted(results.select("peers"), key=lambda row: (-row["batch"], -row.get("tokens_per_s", 0)))
        lines = []
        for row in rows:
            if row.get("not_measured"):
                lines.append([row["variant"], f"batch {row['batch']}", NOT_MEASURED, "", "", row["not_measured"]])
                continue
            ratio = figure(row.get("x_transformers"), "{:.2f}")
            cells = [figure(row.get("tokens_per_s")), ratio, tokens(row), row.get("version", "")]
            mark = " †" if results.is_stale(row) else ""
            lines.append([row["variant"] + mark, f"batch {row['batch']}", *cells])
        head = ["engine", "workload chat", "tokens/s", "× transformers", "tokens", "version or reason"]
        note = f"\n† {OLDER}\n" if any(map(results.is_stale, rows)) else ""
        return table(head, lines, left=2) + note if lines else ""

    return sections(report, body)


def seed_claim(report: Report) -> str:
    """The articles' end points (49 % with the naive gather, 88 % after) beside what was measured here."""

    def body(results: Results) -> str:
        lines = []
        for step in report.steps:
            cells = []
            for batch in (1, 4, 8):
                row = results.row("end_to_end", step.slug, "chat", batch)
                cells.append(figure(row and row.get("x_transformers") and 100 * row["x_transformers"], "{:.0f} %"))
            lines.append([_name(step.slug), *cells])
        head = ["tokens/s as a share of transformers.generate", "batch 1", "batch 4", "batch 8"]
        return table(head, lines) if results.select("end_to_end", workload="chat") else ""

    return sections(report, body)


def environment(report: Report) -> str:
    def body(results: Results) -> str:
        env = results.environment
        versions = ", ".join(f"{name} {version}" for name, version in env["versions"].items() if version)
        lines = {
            "CPU": f"{env['cpu']}, {env['cores']} cores ({env['logical_cores']} logical), {env['vector_units']}, "
            f"{env['memory_gib']} GiB",
            "GPU": env["gpu"] or "none",
            "threads of torch and numba": str(env["threads"]),
            "model": env["model"] + (" (random weights)" if env["random_weights"] else ""),
            "dtype": env["dtype"],
            "system": f"{env['system']}, Python {env['python']}",
            "versions": versions,
            "commit": f"`{env['commit']}`" + (" with uncommitted changes" if env["dirty"] else ""),
            "measured": f"{env.get('started', NOT_MEASURED)}, {env.get('measured_s', 0) / 60:.0f} minutes",
            "load average": f"{figure(env.get('load_before'))} before, {figure(env.get('load_after'))} after",
            "not measured": "; ".join(f"{k}: {v}" for k, v in env.get("not_measured", {}).items()) or "—",
            "rows": str(len(results.rows)),
        }
        return table(["", ""], [[name, value] for name, value in lines.items()], left=2)

    return sections(report, body)


def readme(report: Report) -> str:
    """The short table between README's markers."""
    results = report.primary
    if results is None or not results.select("end_to_end", workload="chat", batch=8):
        return "Not measured yet: `make bench-full publish-results report` fills this table.\n"
    columns = [
        END_TO_END[0],
        END_TO_END[1],
        END_TO_END[2],
        ("decode step ms", lambda r: figure(r.get("decode_step_ms"))),
    ]
    env = results.environment
    where = f"{env['cpu']}, {env['threads']} threads, {env['model']} {env['dtype']}"
    intro = f"Eight chat prompts at once, 128 new tokens each; {where}, torch {env['versions']['torch']}:\n\n"
    return intro + by_variant(results, report.variants, columns, "end_to_end", "chat", 8)


def _workloads(results: Results, variants: Sequence[str], workload: str, batches: Sequence[int]) -> str:
    return "\n".join(
        f"{workload}, batch {batch}\n\n" + by_variant(results, variants, END_TO_END, "end_to_end", workload, batch)
        for batch in batches
        if results.select("end_to_end", workload=workload, batch=batch)
    )


def _name(variant: str) -> str:
    return variant if variant == BASELINE else f"`{variant}`"


def _size(workload: str) -> int:
    return int(workload.rsplit("-", 1)[1])


def _mega(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def _short(value: float) -> str:
    """Three significant digits, no exponent."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"
