"""`tokenyard bench experts --device cuda`: cells on a GPU, and the table of what was measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenyard.cli.bench_cuda import conclude
from tokenyard.cli.output import console, save_json
from tokenyard.cli.tables import print_table

if TYPE_CHECKING:
    from tokenyard.lab.bench.expert_figures import Cell


def cases_of(names: str | None) -> list[str]:
    """The cases that an option like `A,C` or `all` names.

    >>> cases_of("a, C"), cases_of("all")
    (['A', 'C'], [])
    """
    if names is None or names.strip().lower() == "all":
        return []
    return [name.strip().upper() for name in names.split(",")]


def experts_on_gpu(
    cells: list[Cell], *, rounds: int, out: Path | None, plot: Path | None, as_json: bool
) -> None:
    """Measure the cells on the current GPU; print, save and draw."""
    import torch

    from tokenyard.cli.machine import provenance
    from tokenyard.lab.bench import experts_cuda as bench
    from tokenyard.lab.bench.dispatch_cuda import check_gpu
    from tokenyard.lab.bench.expert_figures import BENCHMARK, missed
    from tokenyard.lab.bench.graph_clock import graph_clock
    from tokenyard.lab.bench.picture import check_picture

    if plot is not None:
        check_picture(plot)
    device = check_gpu("leave out --device to measure on the CPU")
    gpu = torch.cuda.get_device_name(device)
    document: dict[str, Any] = {"benchmark": BENCHMARK, **provenance(), "gpu": gpu, "rounds": rounds}
    if out is not None:
        save_json(document, out)  # a file that cannot be written is found out before the time is spent
    errors = console(stderr=True)
    errors.print("measuring what this GPU reads and multiplies at best")
    from tokenyard.lab.bench.machine_rates import measure_rates

    clock = graph_clock(device, rounds)
    rested = graph_clock(device, min(rounds, bench.RESTED_ROUNDS), rest=bench.REST)
    rates, rested_rates = measure_rates(device, clock), measure_rates(device, rested)
    torch.cuda.empty_cache()
    rows: list[dict[str, Any]] = []
    unmeasured: dict[str, str] = {}
    document |= {
        "read_TB_per_s": rates.read / 1e6,
        "bf16_TFLOP_per_s": rates.bf16 / 1e6,
        "fp8_TFLOP_per_s": rates.fp8 / 1e6 if rates.fp8 is not None else None,
        "rested": {
            "seconds": bench.REST,
            "read_TB_per_s": rested_rates.read / 1e6,
            "bf16_TFLOP_per_s": rested_rates.bf16 / 1e6,
        },
        "peers_not_measured": unmeasured,
        "results": rows,
    }
    measured = bench.measure_cells(cells, device=device, gpu=gpu, clock=clock, rates=rates, rested=rested)
    for number, (cell, (row, why)) in enumerate(zip(cells, measured, strict=True), start=1):
        rows.append(row)
        if why is not None:
            unmeasured[str(cell)] = why
        took = f"{row['us']:.1f} µs" if row["us"] is not None else row["note"]
        errors.print(f"{number} of {len(cells)}: {cell}: {took}", markup=False)
        if out is not None:
            save_json(document, out)  # as far as it goes: a GPU that is taken away takes no figures with it
    conclude(document, as_json=as_json, plot=plot, failed=bool(missed(rows)))


def print_experts(document: dict[str, Any]) -> None:
    """The figures, for people."""
    from rich.table import Table

    from tokenyard.lab.bench.cuda_figures import number
    from tokenyard.lab.bench.expert_figures import CASES, RECORDED_PEER, missed, summary

    def ratio(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{row[name]:.2f}" if row[name] is not None else ""

    rows = document["results"]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "": lambda row: row["case"],
        "weights": lambda row: row["weights"],
        "rows": lambda row: f"{row['size']:,}",
        "ours": lambda row: number(row["us"]) or "failed",
        "spread": lambda row: f"{number(row['us_min'])}–{number(row['us_max'])}" if row["us"] else "",
        "rested": lambda row: number(row.get("rested_us")),
        "floor": lambda row: number(row["floor_us"]),
        "by": lambda row: row["floor_by"] or "",
        "ours / floor": ratio("floor_ratio"),
        "to reach": lambda row: number(row["target_us"]) + (" *" if row["target_is"] else ""),
        "met": lambda row: {None: "", True: "yes", False: "no"}[row["met"]],
        "torch": lambda row: number(row["peer_us"]),
        "recorded": lambda row: number(row["recorded_peer_us"]),
        "ours / peer": ratio("peer_ratio"),
        "error": lambda row: f"{row['relative_error']:.1e}" if row["relative_error"] is not None else "",
    }
    table = Table(
        title=f"experts, {document['gpu']}: µs, medians, best and worst round; ours sort, weight and sum",
        title_justify="left",
    )
    for column in columns:
        is_text = column in ("", "weights", "by", "met")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=column == "weights")
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    print_table(
        table, less_needed=("rested", "spread", "error", "by", "recorded", "torch", "to reach", "met")
    )
    fp8 = document["fp8_TFLOP_per_s"]
    peers = dict.fromkeys(row["peer"] for row in rows if row["peer"])
    beside = dict.fromkeys(f"{row['weights']}: {row['target_is']}" for row in rows if row["target_is"])
    notes = [
        *(f"{name}: {CASES[name]}" for name in dict.fromkeys(row["case"] for row in rows)),
        f"this GPU reads {document['read_TB_per_s']:.2f} TB/s and multiplies bf16 at "
        f"{document['bf16_TFLOP_per_s']:.0f} TFLOP/s" + (f", fp8 at {fp8:.0f}" if fp8 else ""),
        *_rested(document),
        *([f"torch: {', '.join(peers)}; rows sorted beforehand"] if peers else []),
        *([f"recorded: {RECORDED_PEER}"] if any(row["recorded_peer_us"] for row in rows) else []),
        *(f"* {line}, of this run" for line in beside),
        *(f"torch's products were not measured, {cell}: {why}" for cell, why in _grouped(document)),
        *summary(rows),
        *(f"failed: {line}" for line in missed(rows)),
    ]
    console().print("\n".join(notes), markup=False, soft_wrap=True)


def _rested(document: dict[str, Any]) -> list[str]:
    """What the column of that name is."""
    if "rested" not in document:
        return []
    seconds, rate = document["rested"]["seconds"], document["rested"]["bf16_TFLOP_per_s"]
    return [
        f"rested: after {seconds} s without work before each round; then it multiplies bf16 at {rate:.0f} TFLOP/s"
    ]


def _grouped(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Reasons, each with the cells that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for cell, why in document["peers_not_measured"].items():
        by_reason.setdefault(why, []).append(cell)
    return [("; ".join(cells), why) for why, cells in by_reason.items()]
