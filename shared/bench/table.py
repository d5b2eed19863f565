"""The table a run ends with, on standard output."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shared.bench.plan import HEADLINE

COLUMNS = {
    "tokens": lambda r: (
        "equal" if r["tokens_equal"] else "WRONG" if r["wrong"] else f"differ at {r['first_difference']['position']}"
    ),
    "tokens/s": lambda r: number(r.get("tokens_per_s")),
    "x transformers": lambda r: number(r.get("x_transformers"), "{:.2f}x"),
    "TTFT ms": lambda r: number(r.get("ttft_ms"), "{:.0f}"),
    "TPOT ms": lambda r: number(r.get("tpot_ms")),
    "decode step ms": lambda r: number(r.get("decode_step_ms")),
    "x decode": lambda r: number(r.get("x_transformers_decode"), "{:.2f}x"),
    "KV peak MB": lambda r: number(r.get("peak_kv_bytes", 0) / 1e6 or None),
}


def number(value: float | None, form: str = "{:.1f}") -> str:
    return "not measured" if value is None else form.format(value)


def head(console: Console, env: dict) -> None:
    """The hardware and settings in one line."""
    weights = ", random weights" if env["random_weights"] else ""
    engine = ", steps around its decoder" if env.get("engine") == "transformers" else ""
    console.print(
        f"{env['gpu'] or env['cpu']}, {env['threads']} threads, torch {env['versions']['torch']}, "
        f"transformers {env['versions']['transformers']}{engine}, "
        f"{env['model']} {env['dtype']}{weights}; "
        f"load average {env['load_before']:.1f} before, {env['load_after']:.1f} after",
        highlight=False,
    )


def show(env: dict, rows: list[dict]) -> None:
    """Print the end-to-end rows, headline workload first, and where a decode step's time goes."""
    console = Console(width=None if Console().is_terminal else 140)
    head(console, env)
    end_to_end = [row for row in rows if row["suite"] == "end_to_end"]
    workloads = sorted({(r["workload"], r["batch"]) for r in end_to_end}, key=lambda w: (w != HEADLINE, w))
    for name, batch in workloads:
        table = Table(title=f"{name}, batch {batch}", title_justify="left")
        table.add_column("variant")
        for column in COLUMNS:
            table.add_column(column, justify="right")
        for row in end_to_end:
            if (row["workload"], row["batch"]) == (name, batch):
                table.add_row(row["variant"], *(column(row) for column in COLUMNS.values()))
        console.print(table)
    if env["device"] != "cpu":
        for variant, reason in env["not_measured"].items():
            console.print(f"{variant}: not measured, {reason}", highlight=False)
    parts = [row for row in rows if row["suite"] == "decode_step"]
    if parts:
        names = ("total", "floor", "attention", "gather", "write", "cache", "rest", "predicted")
        table = Table(title="where a decode step's time goes, ms", title_justify="left")
        for column in ("variant", "workload", *names):
            table.add_column(column, justify="left" if column in ("variant", "workload") else "right")
        for row in parts:
            table.add_row(
                row["variant"], f"{row['workload']} x{row['batch']}", *(number(row.get(f"{n}_ms")) for n in names)
            )
        console.print(table)


def show_peers(env: dict, rows: list[dict]) -> None:
    """Print the engines side by side."""
    console = Console(width=None if Console().is_terminal else 140)
    head(console, env)
    for batch in sorted({row["batch"] for row in rows}, reverse=True):
        table = Table(title=f"chat, batch {batch}", title_justify="left")
        for column in ("engine", "tokens", "tokens/s", "x transformers", "version, or why it was not measured"):
            table.add_column(column)
        for row in rows:
            if row["batch"] != batch:
                continue
            if "not_measured" in row:
                table.add_row(row["variant"], "", "not measured", "", row["not_measured"])
                continue
            ratio = number(row.get("x_transformers"), "{:.2f}x")
            table.add_row(
                row["variant"], COLUMNS["tokens"](row), number(row.get("tokens_per_s")), ratio, row.get("version", "")
            )
        console.print(table)
