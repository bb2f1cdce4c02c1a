"""`shard_experts`: one call that spreads a Transformers model's experts over a group.

    sharded = shard_experts(model, group, exchange="one_sided", max_tokens=512)
    sharded.model(input_ids)                             every rank makes the same number of passes
    sharded.generate(input_ids, max_new_tokens=64)       every rank as many as it needs

Attention, norms, routers and shared experts stay where they are, on every rank, and work on that rank's own tokens
(data-parallel attention). Each experts module is replaced by a `ShardedExperts`, which holds the experts of this rank
only, and sends the rows of its tokens through the plan to the ranks that own their experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tokenyard.checkpoints import Checkpoint, open_together
from tokenyard.errors import HandleError, InputError
from tokenyard.exchange import Transport
from tokenyard.experts import ExpertWeights
from tokenyard.formats import Format
from tokenyard.group import Group, GroupLike, as_group, borrowed, make_together
from tokenyard.integrations.transformers.expert_modules import ExpertSource, expert_modules, no_gradient
from tokenyard.integrations.transformers.loading import fill_shared, load_without_experts
from tokenyard.integrations.transformers.reports import LayerReport, Stopwatch, layer_reports
from tokenyard.integrations.transformers.state_dicts import ParameterNames, plain_state_dict
from tokenyard.integrations.transformers.synchronized_passes import SynchronizedPasses
from tokenyard.layer import MoELayer
from tokenyard.layer.compiled import is_training_step, without_gradient
from tokenyard.planning.choosing import AUTO
from tokenyard.planning.drafting import Draft, draft
from tokenyard.planning.planner import Plan, mesh_of, plan_draft
from tokenyard.routing import Placement, Routes

Function = TypeVar("Function", bound=Callable[..., Any])

# The least deadline, in seconds, while ranks read and quantize weights, and wait for the slowest of them.
LOADING_DEADLINE = 1800.0


def shard_experts(
    model: nn.Module,
    group: GroupLike,
    *,
    exchange: str | type[Transport] = AUTO,
    wire: str | Format | None = None,
    combine_wire: str | Format | None = None,
    weights: str | None = None,
    inner: str | Format | None = None,
    max_tokens: int = 1024,
    max_rows: int | None = None,
    placement: str | Placement | None = None,
    spare_experts: int = 0,
    training: bool = False,
    checkpoint: Checkpoint | str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ShardedModel:
    """Replace the experts of a model by this rank's share of them. Collective over the group; the model is changed.

    Every rank passes the same model, each its own copy. `wire` and `combine_wire` are the formats in which rows travel
    out and back, `weights` the one that holds this rank's experts (plain ones are quantized on the way in).
    `inner` is how numbers are held between an expert's two products, by default as the recipe of the checkpoint has it,
    else exactly. A rank brings up to `max_tokens` tokens to one round trip; `generate` and `passes` split larger
    batches. `exchange`, `max_rows` and `placement` are those of a plan. With `spare_experts`, memory for
    this number of further experts of each layer, experts can move between ranks while the model is in use
    (`sharded.plan.rebalance`, `sharded.plan.autobalance`).

    With `training`, the plan is one for training, and the experts' weights are parameters of the model. Their gradients
    are those of the sum of all ranks' losses. Gradients of all other parameters are those of this rank's loss: sum them
    over the ranks, or wrap these modules in FSDP.

    With a `checkpoint` (a folder) experts are read from there, this rank's and no others. The model may then come
    without them (`experts_left_out`), or have been built on the meta device. `progress(done, all)` is called with
    numbers of layers.
    """

    def read() -> tuple[list[ExpertSource], Draft]:
        sources = [ExpertSource(module, opened, weights, inner) for module in expert_modules(model)]
        specs = [
            replace(
                source.spec,
                wire=wire,
                combine_wire=combine_wire,
                placement="contiguous" if placement is None else placement,
                spare_experts=spare_experts,
            )
            for source in sources
        ]
        # Scales are small, and show whether a checkpoint is good: they are read before any rank allocates.
        drafted = draft(
            specs,
            ranks.size,
            exchange=exchange,
            max_tokens=max_tokens,
            max_rows=max_rows,
            training=training,
            device=ranks.device,
        )
        for source, wiring in zip(sources, drafted.wirings, strict=True):
            source.prepare(wiring.exchange_spec.placement.local_experts(ranks.rank))
        return sources, drafted

    with borrowed(group) as ranks:
        opened = open_together(checkpoint, ranks) if isinstance(checkpoint, str | Path) else checkpoint
        (sources, drafted), _ = make_together(ranks, "reading the model", read, seconds=LOADING_DEADLINE)
    kept = as_group(group)
    mesh = mesh_of(group) if training else None
    made = plan_draft(lambda: drafted, kept, made_group=kept is not group, mesh=mesh)
    passes = SynchronizedPasses(made, [source.spec.name for source in sources])
    report = progress or (lambda done, all_of_them: None)

    def take() -> list[ShardedExperts]:
        if opened is not None:
            fill_shared(model, opened)
        experts = []
        for index, source in enumerate(sources):
            report(index, len(sources))
            name, device = source.spec.name, kept.device
            names = ParameterNames.of(source.module)
            # No copy of the weights that are taken outlives this line.
            experts.append(
                ShardedExperts(made, name, source.take(device), index=index, passes=passes, names=names)
            )
            source.module.replace_by(experts[-1])  # frees the memory of experts that other ranks own
        report(len(sources), len(sources))
        return experts

    try:
        experts, _ = make_together(kept, "sharding the experts", take, seconds=LOADING_DEADLINE)
    except BaseException:
        made.close()
        raise
    return ShardedModel(model, made, passes, experts)


def load_sharded(
    path: Checkpoint | str | Path, group: GroupLike, *, dtype: torch.dtype | None = None, **options: Any
) -> ShardedModel:
    """Load a causal language model, with this rank's share of the experts. Collective over the group.

    Each rank reads the shared tensors, and its own experts. `options` are those of `shard_experts`; `dtype` is the
    model's, by default that of its config.
    """
    with borrowed(group) as ranks:
        checkpoint = path if isinstance(path, Checkpoint) else open_together(path, ranks)

        def load() -> Any:
            return load_without_experts(checkpoint, dtype=dtype).to(ranks.device)

        model, _ = make_together(ranks, "loading the model", load, seconds=LOADING_DEADLINE)
    return shard_experts(model, group, checkpoint=checkpoint, **options)


_never_compiled: Callable[[Function], Function] = torch.compiler.disable


class ShardedExperts(nn.Module):
    """Replaces a model's experts module, and is called in the same way."""

    index: int  # the number of the layer among the MoE layers of the model
    passes: SynchronizedPasses  # the passes that ranks make together

    def __init__(
        self,
        made: Plan,
        name: str,
        weights: ExpertWeights,
        *,
        index: int,
        passes: SynchronizedPasses,
        names: ParameterNames,
    ) -> None:
        super().__init__()
        self.names = names  # of the model's own experts, for state dicts
        # Nothing else holds these weights. On a GPU they are copied even so: experts leave adopted tensors as they are,
        # and bring their own into the order that is fastest there.
        adopt = made.group.device.type == "cpu"
        self.layer = MoELayer(made, name, weights, adopt=adopt)  # the layer that runs the experts
        self.index, self.passes = index, passes
        # The factor that the weights of the model's router hold.
        self._scaled_by = made.wiring(name).exchange_spec.routed_scaling
        self.stopwatch = Stopwatch(self.layer.experts)  # counts the seconds of the experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each row's experts, on whichever ranks these are."""
        is_flat = hidden_states.dim() == 2  # mostly True, and this test is cheaper than a reshape
        x_TH = hidden_states if is_flat else hidden_states.reshape(-1, hidden_states.shape[-1])
        weights_TK = top_k_weights
        if weights_TK.dtype not in (torch.float32, torch.bfloat16):
            weights_TK = weights_TK.float()
        routes = Routes(topk_ids_TK=top_k_index, topk_weights_TK=weights_TK, scaled_by=self._scaled_by)
        if not torch.compiler.is_compiling():
            y_TH: Tensor = self._in_parts(x_TH, routes)
        elif self.passes.synchronizing:
            y_TH = self._outside_of_the_graph(x_TH, routes)
        else:
            y_TH = self.layer(x_TH, routes)  # one operator, which knows about gradients
        return y_TH if is_flat else y_TH.reshape(hidden_states.shape)

    def _in_parts(self, x_TH: Tensor, routes: Routes) -> Tensor:
        if not torch.is_grad_enabled() or self.layer.plan.training:
            return self._computed(x_TH, routes)
        inputs = (x_TH, routes.topk_weights_TK)
        # With gradients, the layer itself refuses a step of a training, on all ranks.
        with torch.set_grad_enabled(is_training_step(self.layer, inputs)):
            y_TH = self._computed(x_TH, routes)
        return without_gradient(y_TH, inputs, no_gradient)

    _outside_of_the_graph = _never_compiled(
        _in_parts
    )  # agreements with other ranks cannot be part of a graph

    def _computed(self, x_TH: Tensor, routes: Routes) -> Tensor:
        parts = self.passes.begin_layer(self.index, x_TH.shape[0])
        if parts == 1:
            y_TH: Tensor = self.layer(x_TH, routes)
        else:
            most = self.passes.max_tokens
            pieces = [slice(part * most, (part + 1) * most) for part in range(parts)]
            y_TH = torch.cat([self.layer(x_TH[rows], routes.of_tokens(rows)) for rows in pieces])
        self.passes.end_layer(self.index)
        return y_TH

    @torch.no_grad()
    def take_part(self, parts: int) -> None:
        """Compute for the other ranks' tokens in `parts` round trips, to which this rank brings no tokens."""
        nothing = self.layer.no_tokens()
        for _ in range(parts):
            self.layer(nothing.x_TH, nothing.routes_or_logits)

    def extra_repr(self) -> str:
        """What `print(model)` shows of this module."""
        spec, local = self.layer.wiring.spec, self.layer.plan.local_experts(self.layer.name)
        return f"{len(local)} of {spec.num_experts} experts here, {spec.weights}"


class ShardedModel:
    """A model whose experts are on several ranks. Made by `shard_experts`.

    `model` is the model that was given, `plan` what serves its layers, `group` the ranks.
    """

    plan: Plan  # the plan that serves its layers
    group: Group  # the ranks that share the experts

    def __init__(
        self, model: nn.Module, made: Plan, passes: SynchronizedPasses, experts: list[ShardedExperts]
    ) -> None:
        self.model: Any = model  # the model that was given
        self.plan, self.group = made, made.group
        self.experts = experts  # the modules that took the place of the model's experts
        self._passes = passes

    @property
    def layers(self) -> list[str]:
        """The names of the MoE layers, in order."""
        return list(self._passes.layers)

    @property
    def passes_made(self) -> int:
        """Passes that this rank took part in, those without tokens of its own included."""
        return self._passes.passes

    def __call__(self, input_ids: Tensor | None = None, **arguments: Any) -> Any:
        """One pass of the model. Collective: a rank without sequences passes none, and gets None.

        Models of Transformers cannot take an empty batch; here it goes through the MoE layers alone.
        """
        ids = input_ids if input_ids is not None else arguments.get("inputs_embeds")
        if ids is None or ids.shape[0] == 0:
            if self.plan.training and torch.is_grad_enabled():
                self._refuse_idle_step()
            if not self._passes.synchronizing:  # else `passes` serves the other ranks at its end
                self._take_part(1)
            return None
        return self.model(input_ids, **arguments)

    def _refuse_idle_step(self) -> None:
        """Raise, on all ranks: without sequences a rank has no loss, and would not make the backward of the others."""
        layer = self.experts[0].layer
        with self.plan.exchange.begin(layer.wiring.exchange_spec):
            raise InputError(
                "this rank brings no sequences to a step that is trained",
                expected="at least one sequence on each rank: a backward is a round trip of all ranks",
                fix="give the rank a sequence whose labels are all -100, or evaluate under torch.no_grad()",
                rank=self.group.rank,
            )

    def _take_part(self, parts: int) -> None:
        """Make a pass to which this rank brings no tokens, with `parts` round trips in each layer."""
        with self._passes.empty_pass():
            for experts in self.experts:
                experts.take_part(parts)

    @contextmanager
    def passes(self) -> Iterator[Any]:
        """Inside, this rank calls the model as often as it needs to, or never. Collective over the group.

        At the end it serves the other ranks with empty batches until all are done: ranks enter and leave together.
        Passes may also bring more tokens than `max_tokens` here.

            with sharded.passes() as model:
                for batch in my_batches:
                    logits = model(batch).logits
        """
        if self.plan.training and torch.is_grad_enabled():
            raise HandleError(
                "passes() was entered with gradients enabled",
                expected="passes that ranks make each in its own number, which have no backward",
                fix="enter it under torch.no_grad(); in training, all ranks call the model equally often",
                rank=self.group.rank,
            )
        with self._passes.synchronized():
            yield self.model
            while not self._passes.all_done():
                self._take_part(self._passes.parts)

    def serve(self) -> None:
        """Take part in the passes of the other ranks, without tokens of this rank, until all ranks are done."""
        with self.passes():
            pass

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, **options: Any) -> Any:
        """`model.generate(inputs, **options)` on every rank, each with its own prompts, options and lengths.

        Collective: a rank that has no prompts calls `generate()` with nothing, and gets None; a batch of no sequences
        comes back as it is. All ranks return when the last one has its tokens.
        """
        prompts = inputs if inputs is not None else options.get("input_ids", options.get("inputs_embeds"))
        with self.passes():
            if prompts is None or prompts.shape[0] == 0:
                return prompts
            return self.model.generate(inputs, **options)

    def plain_state_dict(self) -> dict[str, Tensor] | None:
        """The state dict that the model had before it was sharded, with all experts, on the CPU of rank 0.

        Collective: other ranks get None. `model.load_state_dict` of an unsharded model takes it, and
        `model.save_pretrained(folder, state_dict=…)` writes it.
        """
        return plain_state_dict(self.model, self.experts, self.group)

    def report(self) -> list[LayerReport]:
        """Rows, bytes and seconds of each layer, on every rank. Collective over the group."""
        stats = self.plan.stats()
        mine = {
            experts.layer.name: stats[experts.layer.name].as_dict() | {"experts_s": experts.stopwatch.seconds}
            for experts in self.experts
        }
        return layer_reports(self.layers, self.group.gather_json(mine, phase="reporting"))

    def close(self) -> None:
        """Give the workspace back. The model cannot be called any more; the group stays."""
        self.plan.close()
