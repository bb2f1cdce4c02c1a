"""Bugs of the workspace: too small, moved, or shared with something else."""

from dataclasses import replace

import torch

import tokenyard as ty
from tests.known_bugs.known_bug import PLAIN, AlwaysOn, BugKind, ExchangeCheck, KnownBug, Refusal, planning
from tests.models import spec
from tokenyard.exchange import SharedMemoryTransport
from tokenyard.exchange.transports.one_sided.cpu.transport import Workspace
from tokenyard.exchange.workspace import Region
from tokenyard.formats import Bf16
from tokenyard.routing import Placement


def sized_for_one_format(patch):
    right = SharedMemoryTransport.region_bytes

    def region_bytes(exchange_spec):
        return right(replace(exchange_spec, wire=Bf16()))  # whatever the layer's wire is

    patch.setattr(SharedMemoryTransport, "region_bytes", staticmethod(region_bytes))


def sized_for_the_first_layer(patch):
    right = SharedMemoryTransport.layout_for

    def layout_for(self, exchange_specs):
        return right(self, exchange_specs[:1])

    patch.setattr(SharedMemoryTransport, "layout_for", layout_for)


def sized_without_the_pad(patch):
    right = SharedMemoryTransport.region_bytes

    def region_bytes(exchange_spec):
        need = right(exchange_spec)
        return replace(need, dispatch=exchange_spec.slots * need.dispatch_row)  # rows times bytes of a row

    patch.setattr(SharedMemoryTransport, "region_bytes", staticmethod(region_bytes))


def sized_for_the_data_parallel_group(patch):
    right, data_parallel = SharedMemoryTransport.region_bytes, 2

    def region_bytes(exchange_spec):
        return right(
            replace(exchange_spec, placement=Placement.contiguous(exchange_spec.num_experts, data_parallel))
        )

    patch.setattr(SharedMemoryTransport, "region_bytes", staticmethod(region_bytes))


def old_workspace_kept(patch):
    def serve(self, exchange_specs):
        if self._workspace is None:  # made once, and never looked at again
            self._workspace = Workspace(self.group, self.layout_for(exchange_specs))

    patch.setattr(SharedMemoryTransport, "serve", serve)


def growth_under_a_graph(patch):
    from tokenyard.exchange.transports.one_sided.cuda.transport import CudaTransport

    patch.setattr(CudaTransport, "_check_graphs", lambda self: None)  # nobody asks


def combine_over_dispatch(patch):
    def combine(self, rank, exchange_spec, flight):
        dispatch = self.layout.dispatch_region(flight)
        behind = dispatch.offset + exchange_spec.dispatch_slots.nbytes  # of this layer, not of the largest
        region = Region(offset=behind, nbytes=self.layout.combine)
        return exchange_spec.combine_slots.views(region.of(self.buffers[rank]))

    patch.setattr(Workspace, "combine", combine)


def result_aliases_the_workspace(patch):
    from tokenyard.exchange import results

    right = results.sum_over_ranks

    def sum_over_ranks(home, tokens_by_rank, out_TH, add):
        from_ranks = [rows for rows in home if rows.num_rows]
        if len(from_ranks) == 1 and from_ranks[0].num_rows == len(out_TH) and not add:
            return from_ranks[0].decode(out_TH.dtype)  # one row each: nothing to sum, no copy
        return right(home, tokens_by_rank, out_TH, add)

    patch.setattr(results, "sum_over_ranks", sum_over_ranks)


def _grow(group):
    plan = ty.plan([PLAIN], group, exchange="one_sided")
    plan.extend([spec("head", hidden_size=200)])
    plan.close()


def _grow_under_a_graph(group, *, is_gone=False):
    """The exchange of GPUs, in a CPU's memory. What CUDA does about a graph is done by hand."""
    from tests.exchange.streams import no_streams
    from tokenyard.exchange.transports.one_sided.cuda.transport import CudaTransport

    def exchange_specs(*layers):
        return [wiring.exchange_spec for wiring in ty.draft(layers, group.size, exchange="one_sided").wirings]

    with no_streams():
        transport = CudaTransport(group)
    transport.serve(exchange_specs(PLAIN))
    graphs, before = transport._graphs, transport.workspace.nbytes
    graphs._count += 1  # as `note` does when a graph is captured
    if is_gone:
        graphs._libc.sem_post(graphs._gone)  # as CUDA does when it is destroyed
    transport.serve(exchange_specs(PLAIN, spec("head", hidden_size=200)))
    assert transport.workspace.nbytes > before


def _grow_when_the_graph_is_gone(group):
    _grow_under_a_graph(group, is_gone=True)


KIND = BugKind(
    name="The workspace",
    about="One buffer per rank takes the rows of all layers. Its size depends on every layer, format, pad and "
    "rank. If it is too small, rows overwrite those of other ranks.",
    bugs=(
        KnownBug(
            name="Sized for one format",
            seen="vLLM #39717",
            story="The workspace of a one-sided backend was sized for nvfp4 rows. With bf16 the rows were "
            "longer than their slots: nothing raised, and the model answered nonsense. The fix was an "
            "`if` that refuses all other formats.",
            mutate=sized_for_one_format,
            in_check=ExchangeCheck(name="bitwise_movement"),
            caught_by=AlwaysOn(
                name="ContractError",
                when="when a layer with float32 rows is planned",
                run=planning(spec(dtype=torch.float32, weights="fp32")),
            ),
            says="layer 'moe', rank 0: a region of the workspace has 2560 bytes; expected at least 4608",
        ),
        KnownBug(
            name="Sized for the first layer only",
            seen="vLLM #42976",
            story="The workspace was sized for the layer that came first, and all others shared it. In a model "
            "with a 4-bit body and a bf16 prediction head, the rows of the head overflowed.",
            mutate=sized_for_the_first_layer,
            in_check=ExchangeCheck(name="heterogeneous_layers"),
            caught_by=AlwaysOn(
                name="ContractError",
                when="when a body and a wider head are planned together",
                run=planning(PLAIN, spec("head", hidden_size=200)),
            ),
            says="layer 'head', rank 0: a region of the workspace has 2560 bytes",
        ),
        KnownBug(
            name="Sized without the pad",
            story="Kernels want rows, scales and ids to start at aligned addresses, so each is padded. With "
            "powers of two the padding is empty, and a size of rows times bytes is right in every test. "
            "With an odd width it is too small.",
            mutate=sized_without_the_pad,
            in_check=ExchangeCheck(name="bitwise_movement"),
            caught_by=AlwaysOn(
                name="ContractError",
                when="when a layer of an odd width is planned",
                run=planning(spec(hidden_size=33)),
            ),
            says="layer 'moe', rank 0: a region of the workspace has 2624 bytes; expected at least 2688",
        ),
        KnownBug(
            name="Sized for the data-parallel group",
            story="Rows come from all ranks of the expert group. The data-parallel group has as many ranks only "
            "if nothing is tensor-parallel; otherwise the last ranks' rows overflow. (The regression test "
            "of #42976 builds its workspace on the data-parallel group, and passes.)",
            mutate=sized_for_the_data_parallel_group,
            in_check=ExchangeCheck(name="bitwise_movement"),
            caught_by=AlwaysOn(
                name="ContractError",
                when="when a plan is made on four ranks, two of which are data-parallel",
                run=planning(PLAIN),
                world=4,
            ),
            says="expected at least 5120: 64 slots",
        ),
        KnownBug(
            name="The old workspace kept after growth",
            seen="vLLM #42976",
            story="The workspace grows, but a part that holds the old buffer keeps using it. The report's own "
            "regression test asserts that growth makes a new object.",
            mutate=old_workspace_kept,
            in_check=ExchangeCheck(name="growing_plans"),
            caught_by=AlwaysOn(name="ContractError", when="in `plan.extend` with a wider layer", run=_grow),
            says="layer 'head', rank 0: a region of the workspace has 2560 bytes",
        ),
        KnownBug(
            name="Growth under a live CUDA graph",
            story="A captured graph holds the addresses of its buffers. If the workspace is rebuilt, a replay "
            "writes into memory that has another owner by then, and waits for flags that are never set. "
            "(This test has no GPU: it counts the graph as a capture would.)",
            mutate=growth_under_a_graph,
            also_alive=_grow_when_the_graph_is_gone,
            caught_by=Refusal(
                name="HandleError",
                when="where the workspace of a GPU would be rebuilt while a graph is alive",
                run=_grow_under_a_graph,
            ),
            says="no error; expected HandleError",
        ),
        KnownBug(
            name="A combine region over another layer's dispatch region",
            seen="vLLM #42976",
            story="Results are placed behind the rows of their own layer, and not behind those of the largest "
            "layer. A small layer's results then overlap a large layer's rows, as soon as a fast rank "
            "sends rows of the next layer while a slow one still reads results.",
            mutate=combine_over_dispatch,
            caught_by=ExchangeCheck(name="regions_never_overlap"),
            says="results of layer 'small' lie over",
        ),
        KnownBug(
            name="A result that aliases the workspace",
            story="If all results come from one rank, there is nothing to sum, and a copy seems unnecessary. "
            "The result is then a view of the workspace, which the next layer overwrites.",
            mutate=result_aliases_the_workspace,
            caught_by=ExchangeCheck(name="output_is_kept"),
            says="an output that was kept over three rounds gave other bits than the twin",
        ),
    ),
)
