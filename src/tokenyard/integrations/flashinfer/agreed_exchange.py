"""An exchange that learns its layers from the calls, and keeps the same list of them on every rank.

A layer of a plan is declared before the first token. FlashInfer's callers declare nothing: what travels is known from
the tensors that they pass, and may change from call to call. So an `AgreedExchange` keeps a list of *manifests* (dtypes
and shapes of a call, and its `runtime_max_tokens_per_rank`), the same list on every rank, and a spec of the exchange
for each of them.

- A manifest that is on the list costs nothing more: the exchange's own announcement carries its number, so ranks that
  bring different manifests see the difference in the flags of the same round.
- A rank that brings a new manifest, or has an error to report, announces spec 0. This makes the round an *agreement
  round*, in which no rows move. All ranks then gather the manifests and the errors of all ranks. If a rank has an
  error, or if manifests differ, all ranks raise. Otherwise the new manifest goes on the list, the workspace grows if it
  has to, and the round is made again.

Results have a manifest of their own (width and dtype), which is not known when rows are dispatched. A dispatch that is
in flight is therefore *redirected* to the spec of its results. A combine needs nothing that its dispatch left in the
workspace, so the workspace may grow even between the two.

On GPUs (`tokenyard.integrations.flashinfer.device_carrier`) the host waits for no rank in a call whose
manifest is on the list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from tokenyard.errors import Drifted, PeerFailed, PlanError, TokenyardError
from tokenyard.exchange import ExchangeSpec, RoundTrip, SharedMemoryTransport
from tokenyard.formats import EncodedRows, Payload, for_dtype
from tokenyard.group import Disagreement
from tokenyard.group.base import Group
from tokenyard.integrations.flashinfer.carriers import NeedsAgreement, carrier_for
from tokenyard.integrations.flashinfer.manifest import Manifest, PayloadSet, as_matrix
from tokenyard.routing import Placement, Routes

Result = TypeVar("Result")

# The wire of specs that dispatch no rows: those of results, and that of agreement rounds.
_NOTHING = PayloadSet(entries=(Payload(name="nothing", dtype=torch.uint8, width=1),))


class AgreedExchange:
    """Dispatches and combines payloads of any dtypes and shapes, as long as all ranks of a group bring the same.

    `rank` is the number by which errors name this rank. Making one is collective: before anything is set up, each rank
    runs its `check`, and the texts `given`, which list the arguments, are compared between ranks.
    """

    def __init__(
        self,
        group: Group,
        *,
        placement: Callable[[], Placement],
        top_k: int,
        max_tokens: int,
        rank: int,
        given: str,
        check: Callable[[], None],
    ) -> None:
        self.group, self._rank = group, rank
        self._top_k, self._max_tokens = top_k, max_tokens
        number = group.count_plan()
        self._agree("MoeAlltoAll", f"{given}, number {number} of this group", self.attempt(check)[1])
        if reason := SharedMemoryTransport.reaches(group, group.gather_json(group.host())):
            raise PlanError(str(reason), expected="ranks that share memory", fix=reason.why, rank=rank)
        self._placement = placement()
        self.carrier = carrier_for(group, plan_id=number)
        self.exchange = self.carrier.exchange
        self.flight: RoundTrip | None = None  # the dispatch that is not combined yet
        # The specs of the manifests that all ranks know; the spec under None is for agreement rounds.
        self.specs: dict[Manifest | None, ExchangeSpec] = {}
        self._warm: set[Manifest | None] = set()
        # In place of routing weights, which routes must have: a caller that sends weights sends them as a payload.
        self._ones_TK = torch.ones(max_tokens, top_k, device=group.device)
        self.specs[None] = self._spec(None, 0)
        self._serve(self.specs)

    # -- Dispatch ------------------------------------------------------------------------------------------

    def dispatch(
        self, check: Callable[[], Manifest], ids_TK: Tensor, payloads: Sequence[Tensor]
    ) -> tuple[Manifest, list[Tensor]]:
        """Send the payloads of a checked batch; return its manifest and, for each payload, all slots: `[S, width]`."""

        def announce(need: NeedsAgreement) -> None:
            with self.exchange.begin(self.specs[None]):
                raise need

        manifest, _ = self._agreed("dispatch", check, announce)
        spec = self.specs[self._listed(manifest)]
        names = [payload.name for payload in spec.wire.payloads(1)]
        matrices = dict(zip(names, map(as_matrix, payloads), strict=True))
        rows = EncodedRows(format=spec.wire, hidden_size=1, payloads=matrices)
        routes = Routes(topk_ids_TK=ids_TK, topk_weights_TK=self._ones_TK[: len(ids_TK)])
        self.flight = self._explained(
            manifest, partial(self.carrier.move, spec, rows, routes, manifest.max_tokens)
        )
        return manifest, [self.flight.received.rows.payloads[name] for name in names]

    # -- Combine -------------------------------------------------------------------------------------------

    def redirect(self, check: Callable[[], Manifest]) -> Manifest:
        """Agree with all ranks on the manifest of the results, and switch the dispatch in flight to its spec."""
        flight, self.flight = self.flight, None
        assert flight is not None

        def announce(need: NeedsAgreement) -> None:
            flight.redirect(self.specs[None])
            flight.refuse(need)

        wanted, is_new = self._agreed("combine", check, announce)
        spec = self.specs[self._listed(wanted)]
        self.carrier.redirect(flight, spec, wanted.max_tokens, again=is_new)
        self.flight = flight
        return wanted

    def results(self, manifest: Manifest) -> Tensor:
        """A view of this rank's workspace for results of a manifest, `[ranks, max_tokens, H]`, always in one region."""
        spec = self.specs[self._listed(manifest)]
        rows_SH = self.carrier.results(spec, manifest.max_tokens).rows_SH
        return rows_SH.view(self.group.size, manifest.max_tokens, spec.hidden_size)

    def combine(
        self, manifest: Manifest, payload: Tensor | None, output: Tensor | None, *, in_float32: bool = False
    ) -> Tensor:
        """Combine the redirected dispatch. `payload` is None if the results are in the workspace already.

        The sum is rounded to the dtype of the results, or stays float32 with `in_float32`, which ranks need not
        agree on.
        """
        flight, self.flight = self.flight, None
        assert flight is not None
        if in_float32:
            summed = replace(flight.spec, dtype=torch.float32)
            self.carrier.redirect(flight, summed, manifest.max_tokens)
        if payload is not None:
            self.carrier.place(flight, self.results(manifest), payload)
        buffer = flight.received.results
        assert buffer is not None  # results travel back as they are
        back = partial(flight.combine, buffer.placed(), out=output)
        return self._explained(manifest, back).y_TH

    def knows(self, manifest: Manifest) -> bool:
        """Whether this manifest is on the list, which is the same on all ranks."""
        return self._listed(manifest) in self.specs

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of this rank's workspace."""
        mine = self.carrier.own_buffer.untyped_storage()
        return tensor.untyped_storage().data_ptr() == mine.data_ptr()

    def close(self) -> None:
        """Give the workspace back. Later calls raise."""
        self.exchange.close()
        self.flight = None

    # -- Agreeing ------------------------------------------------------------------------------------------

    def attempt(self, make: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
        """Run a check; return its result, or its error, which must not be raised before the other ranks have it."""
        try:
            return make(), None
        except Exception as error:
            return None, error.at(rank=self._rank) if isinstance(error, TokenyardError) else error

    def learn(self, manifest: Manifest) -> None:
        """Put a manifest on the list, and let the workspace grow if it has to. Collective."""
        known = dict(self.specs)
        # Also listed with the largest number of tokens: the workspace then need not grow for another number.
        for each in (self._listed(manifest), replace(manifest, max_tokens=self._max_tokens)):
            if each is not None and each not in known:
                known[each] = self._spec(each, len(known))
        self._serve(known)
        self.specs = known

    def _listed(self, manifest: Manifest | None) -> Manifest | None:
        """The manifest on the list that serves this one: that of the most tokens, unless the number must be exact."""
        if manifest is None or self.carrier.needs_exact_tokens:
            return manifest
        return replace(manifest, max_tokens=self._max_tokens)

    def _agreed(
        self, phase: str, check: Callable[[], Manifest], announce: Callable[[NeedsAgreement], None]
    ) -> tuple[Manifest, bool]:
        """The manifest that all ranks bring to a phase, and whether it was new: that takes an agreement round first.

        `announce` starts that round: this rank announces that it needs an agreement, and receives the announcements of
        the others.
        """
        manifest, error = self.attempt(check)
        if error is None and manifest is not None and self.knows(manifest):
            return manifest, False
        self.carrier.check_may_agree(f"what this {phase} brings ({manifest})", error)
        # If other ranks are not in an agreement round: they receive this as an error, and this rank may raise it.
        cause = error or Drifted(
            f"this rank brings {manifest} to {phase}, which is new, and others bring what is not",
            expected="the same dtypes and shapes on every rank",
            fix="pass payloads of the same kind on every rank",
            rank=self._rank,
        )
        try:
            announce(NeedsAgreement(cause))
        except (NeedsAgreement, Drifted) as announced:
            # The error and the frames of its traceback refer to each other, which would keep the workspace alive.
            announced.__traceback__ = None
        if not self.carrier.all_need_agreement():
            raise cause
        self._agree(phase, str(manifest), error)
        assert manifest is not None  # there was no error
        self.learn(manifest)
        return manifest, True

    def _agree(self, phase: str, mine: str, error: Exception | None) -> None:
        """Raise on every rank if one of them has an error, or if their texts `mine` differ."""
        report = {"error": None if error is None else f"{type(error).__name__}: {error}", "brings": mine}
        by_rank = self.group.gather_json(report, phase=f"agreement on {phase}")
        if error is not None:
            raise error
        for rank, other in enumerate(by_rank):
            if other["error"] is not None:
                raise PeerFailed(rank, other["error"], phase=phase, rank=self._rank)
        brought = [other["brings"] for other in by_rank]
        if len(set(brought)) > 1:
            raise Disagreement(f"the arguments of {phase}", brought, rank=self._rank)

    def _explained(self, manifest: Manifest, call: Callable[[], Result]) -> Result:
        """Make a call of the exchange. If manifests differ between ranks, raise an error that lists them by rank."""
        try:
            return call()
        except Drifted:
            if self.carrier.reads_values:  # else the ranks may be in different calls by now
                self._agree(manifest.phase, str(manifest), None)
            raise

    def _serve(self, known: Mapping[Manifest | None, ExchangeSpec]) -> None:
        """Serve these specs, and load their kernels before any kernel waits for another rank. Collective."""
        self.exchange.serve(list(known.values()))
        new = {manifest: spec for manifest, spec in known.items() if manifest not in self._warm}
        # A combine with a quantized output keeps the sum in float32.
        in_float32 = [
            replace(spec, dtype=torch.float32)
            for manifest, spec in new.items()
            if manifest is not None and manifest.phase == "combine" and spec.dtype != torch.float32
        ]
        self.exchange.warmup([*new.values(), *in_float32])
        self._warm |= set(known)

    def _spec(self, manifest: Manifest | None, number: int) -> ExchangeSpec:
        """The spec for the rows or the results of a manifest; for None, that of agreement rounds, which move none."""
        name, max_tokens, wire = "agreement", 0, _NOTHING
        hidden_size, dtype = 1, torch.bfloat16
        if manifest is not None:
            name, max_tokens = f"{manifest.phase} {number}", manifest.max_tokens
            if manifest.phase == "combine":
                ((dtype, (hidden_size,)),) = manifest.rows
            else:
                wire = manifest.wire()
        return ExchangeSpec(
            layer=name,
            index=number,
            hidden_size=hidden_size,
            num_experts=self._placement.num_experts,
            top_k=self._top_k,
            max_tokens=max_tokens,
            dtype=dtype,
            wire=wire,
            combine_wire=for_dtype(dtype),
            placement=self._placement,
        )
