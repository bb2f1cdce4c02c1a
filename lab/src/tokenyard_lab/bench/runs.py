"""The runs of `tokenyard bench`: what each measures, step by step, and the document that its figures go into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from tokenyard.exchange import resolve
from tokenyard.machine_rates import copy_rate, host_clock
from tokenyard.planning.drafting import draft
from tokenyard_lab.bench import (
    balance,
    clock,
    combine_error,
    dispatch,
    dispatch_cells,
    dispatch_cuda,
    encode,
    experts,
    experts_peers,
    hosts_overlap,
    layer_cuda,
    machine_rates,
    overhead,
    transformers_ep,
)
from tokenyard_lab.bench import hosts as hosts_bench
from tokenyard_lab.bench.records import Document, Record
from tokenyard_lab.bench.shapes import MODELS, Case, Cell, Shape, cases_of, cells_of, check_top_k, grid
from tokenyard_lab.hosts.network import check_hosts
from tokenyard_lab.unscaled_e4m3 import studied_format, studied_ways_back


class _Kind(NamedTuple):
    """The fields that all documents of a benchmark share: see `Document`."""

    unit: str
    x: str
    line: str | None
    columns: tuple[str, ...]


_KINDS = {
    "encode": _Kind("MB/s", "tokens", "format", ()),
    "experts": _Kind("ms", "tokens", "weights", ("floor_by", "difference")),
    "experts-cuda": _Kind("µs", "size", "weights", experts.COLUMNS),
    "dispatch": _Kind("ms", "tokens", "exchange", ("out_ms", "back_ms", "encode_ms", "bytes_per_token")),
    "dispatch-cuda": _Kind("µs", "tokens", "wire", ("peer_source",)),
    "layer-cuda": _Kind("µs", "tokens", "weights", ("wire", "relative_error")),
    "transformers": _Kind(
        "ms", "phase", None, ("peer", "with our experts_ms", "no exchange_ms", "difference")
    ),
    "overhead": _Kind("ms", "call", None, ()),
    "combine-error": _Kind("%", "ranks", "combine_wire", ("ordinary", "bytes_per_row")),
    "hosts": _Kind("ms", "tokens", "exchange", ("crossed_MB", "least_MB")),
    "balance": _Kind("ms", "what", None, ("busiest / mean", "moved_MB", "GB_per_s")),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A benchmark that is checked, and ready to be measured."""

    document: Document
    steps: Sequence[str]  # what is measured, in words
    figures: Iterable[Sequence[Record]]  # the records of each step, measured when the iterator gets to it
    finish: Callable[[], None] = lambda: None  # called after the last step


def _document(benchmark: str, setup: dict[str, Any], *notes: str) -> Document:
    unit, x, line, columns = _KINDS[benchmark]
    return Document(
        benchmark=benchmark, unit=unit, x=x, line=line, columns=columns, setup=setup, notes=list(notes)
    )


def _of_cells(document: Document, cells: Sequence[Any], figures: Iterable[Record]) -> Run:
    """A run that has one record for each cell."""
    return Run(document=document, steps=[str(cell) for cell in cells], figures=([one] for one in figures))


def _of_tokens(document: Document, tokens: Sequence[int], measure: Callable[[int], Sequence[Record]]) -> Run:
    """A run that has a step for each number of tokens."""
    return Run(document=document, steps=[f"{count} tokens" for count in tokens], figures=map(measure, tokens))


# -- On a CPU ----------------------------------------------------------------------------------------------


def encode_run(tokens: Sequence[int], hidden_size: int, seconds: float) -> Run:
    """How fast one thread encodes rows."""
    document = _document("encode", {"hidden_size": hidden_size, "threads": 1}, encode.NOTE)
    return _of_tokens(document, tokens, lambda count: encode.measure_encode(count, hidden_size, seconds))


def experts_cpu_run(tokens: Sequence[int], weights: Sequence[str], rounds: int, **sizes: int) -> Run:
    """Grouped experts beside Transformers, or beside weights that are decoded first."""
    check_top_k(sizes["top_k"], sizes["num_experts"])
    if "bf16" in weights:
        experts_peers.check_transformers()
    shape = Case(
        **sizes,  # type: ignore[arg-type]
        local_experts=sizes["num_experts"],
        weights=tuple(weights),
        sizes=tuple(tokens),
        arrives=tuple((name, "bf16") for name in weights),
    )
    measured, device, times = cells_of(shape), torch.device("cpu"), host_clock(rounds)

    def figures() -> Iterator[Record]:
        rates = machine_rates.measure_rates(device, times)
        document.setup |= rates.as_setup()
        machine = machine_rates.Machine(device=device, name="cpu", clock=times, rates=rates)
        yield from experts.measure_experts(measured, kind=experts.GROUPED, machine=machine)

    setup = {**sizes, "threads": torch.get_num_threads(), "rounds": rounds}
    note = "peers: Transformers, or weights that are decoded first for F.grouped_mm"
    document = _document("experts", setup, note)
    return _of_cells(document, measured, figures())


def dispatch_cpu_run(
    ranks: Sequence[int],
    tokens: Sequence[int],
    wire: Sequence[str],
    exchange: Sequence[str] | None,
    paranoid: bool,
    **layer: Any,
) -> Run:
    """Dispatch and combine through every exchange, beside bare gloo."""
    (world,) = ranks
    further = {**layer, "exchanges": exchange, "paranoid": paranoid}

    def measure(count: int) -> list[Record]:
        jobs = [dispatch.Job(**further, num_tokens=count, wire=name) for name in wire]
        return [record for job in jobs for record in dispatch.measure_dispatch(job, world)]

    document = _document("dispatch", {"ranks": world, "kind": "processes", **layer}, dispatch.NOTE)
    return _of_tokens(document, tokens, measure)


def transformers_run(**sizes: Any) -> Run:
    """A sharded model beside Transformers' own expert parallelism."""
    work = transformers_ep.Workload(**sizes)
    step = f"{work.ranks} processes load the model, try Transformers' layouts, then {work.rounds} rounds"
    return Run(
        document=_document("transformers", asdict(work), transformers_ep.NOTE),
        steps=[step],
        figures=(transformers_ep.measure_transformers_ep(work) for _ in range(1)),
    )


def overhead_run(rounds: int) -> Run:
    """A layer beside its experts, and the shipped model beside plain Transformers."""
    experts_peers.check_transformers()
    return Run(
        document=_document("overhead", {"rounds": rounds}, overhead.NOTE),
        steps=["a layer beside its experts", "the model that ships beside plain Transformers"],
        figures=overhead.measure_overhead(rounds),
    )


def combine_error_run(ranks: Sequence[int] | None, combine_wire: Sequence[str] | None, **sizes: int) -> Run:
    """The error of a layer's output for every format on the way back."""
    study = combine_error.Study(**sizes)
    check_top_k(study.top_k, study.num_experts)
    wires = [str(studied_format(name)) for name in combine_wire or studied_ways_back()]
    cells = [(count, results) for results in combine_error.RESULTS for count in ranks or combine_error.RANKS]
    return Run(
        document=_document("combine-error", asdict(study), *combine_error.NOTES),
        steps=[f"{results} results on {count} ranks" for count, results in cells],
        figures=(combine_error.measure_combine_error(study, *cell, wires) for cell in cells),
    )


def hosts_run(
    hosts: int, ranks: int, tokens: Sequence[int], exchange: Sequence[str] | None, **setup: Any
) -> Run:
    """A layer over links of a rate and a delay, between hosts that are made on this machine."""
    check_top_k(setup["top_k"], setup["num_experts"])
    check_hosts()
    names = tuple(dict.fromkeys(resolve(name).name for name in exchange or hosts_bench.EXCHANGES))

    def job(count: int) -> hosts_bench.Job:
        return hosts_bench.Job(ranks_by_host=(ranks,) * hosts, num_tokens=count, exchanges=names, **setup)

    for name in names:  # raises if a layer does not fit, before hosts are made
        draft([job(tokens[0]).spec()], hosts * ranks, exchange=name)
    document = _document("hosts", {"hosts": hosts, "ranks_per_host": ranks, **setup}, *hosts_bench.NOTES)
    if not setup["compute"]:
        return _of_tokens(document, tokens, lambda count: hosts_bench.measure_hosts(job(count)))
    document.columns, document.notes = hosts_overlap.COLUMNS, list(hosts_overlap.NOTES)
    return _of_tokens(document, tokens, lambda count: hosts_overlap.measure_overlap(job(count)))


def balance_run(ranks: int, **layer: Any) -> Run:
    """A layer under uniform and uneven load, before and after a move of experts, and the move."""
    job = balance.Job(**layer)
    check_top_k(job.top_k, job.num_experts)
    return Run(
        document=_document("balance", {"ranks": ranks, "kind": "processes", **asdict(job)}, *balance.NOTES),
        steps=[f"{ranks} processes call layers and move experts"],
        figures=(balance.measure_balance(job, ranks) for _ in range(1)),
    )


# -- On a GPU ----------------------------------------------------------------------------------------------


def _shapes(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(f"{cell.case}: {cell.shape}" for cell in cells))


def experts_cuda_run(cells: str | None, weights: Sequence[str], rounds: int) -> Run:
    """Fused experts beside torch's grouped products."""
    measured = grid(cases_of(cells), weights)
    machine = machine_rates.Machine.gpu(rounds)
    setup = {"gpu": machine.name, "rounds": rounds, **machine.rates.as_setup()}
    document = _document("experts-cuda", setup, *_shapes(measured), *experts.NOTES, machine.rested_note())
    figures = experts.measure_experts(measured, kind=experts.FUSED, machine=machine)
    return _of_cells(document, measured, figures)


def dispatch_cuda_run(
    ranks: Sequence[int],
    tokens: Sequence[int],
    wire: Sequence[str],
    rounds: int | None,
    exchange: Sequence[str] | None,  # one_sided, or None
    quick: bool,
    **setup: Any,
) -> Run:
    """The kernels of `one_sided` between virtual ranks, beside FlashInfer."""
    rounds = rounds or (dispatch_cuda.QUICK_ROUNDS if quick else dispatch_cuda.ROUNDS)
    cells = dispatch_cells.dispatch_grid(ranks, tokens, wire, quick=quick)
    shape = Shape(**setup)
    dispatch_cuda.check_cells(cells, shape, rounds)
    device = clock.check_gpu(machine_rates.ON_THE_CPU)
    gpu, graph_clock = torch.cuda.get_device_name(device), clock.graph_clock(device, rounds)
    copied = copy_rate(device, graph_clock)
    setup = {"gpu": gpu, **setup, "rounds": rounds, "copy_TB_per_s": copied / 1e6}
    document = _document("dispatch-cuda", setup, dispatch_cuda.NOTE)

    def measure_peers() -> None:
        said = dispatch_cuda.measure_peers(document.results, shape, device=device, clock=graph_clock)
        document.notes += [said] if said else []

    figures = dispatch_cuda.measure_cells(
        cells, shape, device=device, gpu=gpu, clock=graph_clock, copy_bytes_per_us=copied
    )
    return replace(_of_cells(document, cells, figures), finish=measure_peers)


def layer_shape_run(
    ranks: int, tokens: Sequence[int], weights: Sequence[str], rounds: int, cells: None, **sizes: int
) -> Run:
    """A whole layer of a given shape between virtual ranks."""
    layer_cuda.check_layer(ranks, sizes["num_experts"], sizes["top_k"], weights)
    shape = Case(
        **sizes,  # type: ignore[arg-type]
        local_experts=sizes["num_experts"] // ranks,
        weights=tuple(weights),
        sizes=tuple(tokens),
        tokens_a_rank=True,
    )
    return _layer_run(cells_of(shape), rounds, {"ranks": ranks, **sizes}, *layer_cuda.NOTES)


def layer_cells_run(cells: str, tokens: Sequence[int], weights: Sequence[str], rounds: int) -> Run:
    """Whole layers of models between virtual ranks."""
    found = grid(cases_of(cells), weights, known=tuple(MODELS))
    measured = [cell for cell in found if not tokens or cell.size in tokens]
    notes = (*_shapes(measured), *layer_cuda.NOTES, layer_cuda.DEEPGEMM_NOTE)
    return _layer_run(measured, rounds, {"ranks": measured[0].shape.ranks}, *notes)


def _layer_run(cells: Sequence[Cell], rounds: int, setup: dict[str, Any], *notes: str) -> Run:
    halves = "measure the halves on the CPU: `bench dispatch` and `bench experts`"
    machine = machine_rates.Machine.gpu(rounds, halves)
    setup = {"gpu": machine.name, **setup, "rounds": rounds, **machine.rates.as_setup()}
    return Run(
        document=_document("layer-cuda", setup, *notes, machine.rested_note()),
        steps=[str(cell) for cell in cells],
        figures=layer_cuda.measure_layer(cells, machine),
    )
