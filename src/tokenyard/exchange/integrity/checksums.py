"""Checksums that travel with a row, so that the receiver can check whether the row is what was sent.

They are one more payload, of 64-bit numbers, which transports carry like any other:

    out    source rank │ token │ round │ a checksum of each payload │ a copy of the routes (global ids and weights)
    back   expert rank │ token │ round │ a checksum of each payload
    back through a relay   expert rank │ source rank and token │ …; then in a host's sum   relay's rank │ token │ …

The first three numbers, the *head*, say whose row it is and of which round: they reveal rows that were swapped, dropped
or left from an earlier round. Checksums show which payload was changed. Ids are rewritten on the way, to local ids of
the receiving rank, so they have no checksum: the receiver resolves the copy of the routes again, and compares.

A checksum is the sum of a row's 64-bit words, each times an odd number of its own, modulo 2^64. Any change of a single
word, hence of a single bit, changes it; so do two words in each other's place, except for one in about 2^63 pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tokenyard.errors import Corrupted
from tokenyard.exchange.batch import Batch
from tokenyard.exchange.spec import CHECKSUM_HEAD, CHECKSUMS, SOURCE, TOKEN, ExchangeSpec
from tokenyard.formats.base import EncodedRows, as_bytes
from tokenyard.routing import Routes
from tokenyard.rows import LocalRoutes, ReceivedRows, RoutingLogits

_WORD = 8  # bytes
# Bits of a result's number that hold the token; above them is its source rank, if the result goes to a relay.
_TOKEN_BITS = 32


def checksums(payload_NW: Tensor) -> Tensor:
    """A checksum for each row of a payload, `[N]`: a change of a row's bytes changes it.

    >>> rows = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [2.0, 1.0, 3.0]])
    >>> first, same, other = checksums(rows).tolist()
    >>> first == same, first == other
    (True, False)
    """
    row_bytes = as_bytes(payload_NW)
    if pad := -row_bytes.shape[1] % _WORD:
        row_bytes = torch.nn.functional.pad(row_bytes, (0, pad))
    words_NW = row_bytes.view(torch.int64)
    factors_W = _factors(words_NW.shape[1], words_NW.device)
    if words_NW.device.type == "cpu":  # 2,048 rows of 4 KB on one core: 1.8 ms; 4.6 if it stored the products
        return torch.mv(words_NW, factors_W)
    return (words_NW * factors_W).sum(dim=1)  # a GPU has no product of integer matrices


@cache
def _factors(width: int, device: torch.device) -> Tensor:
    draw, words = torch.Generator().manual_seed(width), torch.iinfo(torch.int64)
    return (torch.randint(words.min, words.max, (width,), generator=draw) | 1).to(device)


# -- The way out -------------------------------------------------------------------------------------------


def checksums_out(rank: int, batch: Batch) -> Tensor:
    """The checksums of a batch, `[T, C]`, as rank `rank` sends it."""
    routes, payloads = batch.routes.routes, batch.payloads
    if isinstance(routes, RoutingLogits):
        payloads["logits"] = routes.logits_RE
    sums = [checksums(payloads[name]) for name in _summed(batch.spec)]
    tokens_T = torch.arange(batch.num_tokens, device=batch.rows.device)
    checksums_TC = torch.stack([*_head(rank, tokens_T, batch.round), *sums], dim=1)
    if isinstance(routes, RoutingLogits):
        return checksums_TC
    return torch.cat([checksums_TC, _copy_routes(routes)], dim=1)


def check_out(
    spec: ExchangeSpec, rank: int, round: int, received: ReceivedRows, checksums_RC: Tensor
) -> None:
    """Raise unless the received rows are those that were sent, in (source rank, token) order."""
    counts_W = torch.tensor(received.counts_W, device=checksums_RC.device)
    sources_R = torch.arange(len(counts_W), device=checksums_RC.device).repeat_interleave(counts_W)
    if len(sources_R) != len(checksums_RC):
        raise Corrupted(
            f"{len(checksums_RC)} rows arrived, and {len(sources_R)} were announced",
            expected="as many rows as were announced",
            place="order",
        )
    _check_heads(spec, round, sources_R, checksums_RC)
    payloads = {name: [payload] for name, payload in received.extra.items()}
    payloads |= {name: _runs(received, payload) for name, payload in received.rows.payloads.items()}
    if isinstance(received.routes, RoutingLogits):
        payloads["logits"] = [received.routes.logits_RE]
    _check_sums({name: payloads[name] for name in _summed(spec)}, sources_R, checksums_RC)
    if isinstance(received.routes, LocalRoutes):
        _check_routes(spec, rank, received.routes, received.counts_W, sources_R, checksums_RC)


def _runs(received: ReceivedRows, payload: Tensor) -> list[Tensor]:
    """The received rows of a payload, as views: one for each source rank, if they lie in a workspace."""
    if received.slots_R is None:
        return [payload]
    slots = received.slots_R.split(received.counts_W)
    return [payload[int(run[0]) : int(run[0]) + len(run)] for run in slots if len(run)]


def _summed(spec: ExchangeSpec) -> list[str]:
    """The names of the payloads that have checksums: those that arrive as they were sent, in packet order."""
    changed = ("ids", "weights", CHECKSUMS)
    return [payload.name for payload in spec.dispatch_layout.payloads if payload.name not in changed]


def _copy_routes(routes: Routes) -> Tensor:
    """Each choice as one number: the bits of its weight above those of its global id."""
    ids_TK = routes.topk_ids_TK.long()
    # The weight of an id of -1 has no meaning, and arrives as zero.
    weights_TK = routes.topk_weights_TK.float().masked_fill(ids_TK < 0, 0.0)
    return (weights_TK.view(torch.int32).long() << 32) | (ids_TK & 0xFFFFFFFF)


def _check_heads(spec: ExchangeSpec, round: int, sources_R: Tensor, checksums_RC: Tensor) -> None:
    """Raise at the first row that is of another round, another rank, or out of order."""
    source_R, token_R, round_R = (checksums_RC[:, column] for column in range(CHECKSUM_HEAD))
    misplaced_R = (source_R != sources_R) | (token_R < 0) | (token_R >= spec.max_tokens)
    misplaced_R[1:] |= (sources_R[1:] == sources_R[:-1]) & (token_R[1:] <= token_R[:-1])
    row = _first(misplaced_R | (round_R != round))
    if row is None:
        return
    source, token = int(sources_R[row]), int(token_R[row])
    expected = f"rows that rank {source} sent in round {round}, in the order of its tokens"
    which = f"row {row - int((sources_R < source).sum())} from rank {source}"
    if bool((checksums_RC[row, :CHECKSUM_HEAD] == -1).all()):
        found = f"{which} is an unused slot: no rank wrote it in round {round}"
        raise Corrupted(found, expected=expected, source=source, place="order")
    if int(round_R[row]) != round:
        found = f"{which} is token {token} of round {int(round_R[row])}: it was left there"
    else:
        found = f"{which} is token {token} of rank {int(source_R[row])}: not the one that belongs there"
    raise Corrupted(found, expected=expected, source=source, token=token, place="order")


def _check_sums(
    payloads: Mapping[str, Sequence[Tensor]],
    sources_R: Tensor,
    checksums_RC: Tensor,
    *,
    back: ResultNumbers | None = None,
) -> None:
    """Raise at the first payload, given in parts, whose checksums are not those that came with it.

    `back`: these are results, numbered in this way; None: they are dispatched rows.
    """
    for column, (name, parts) in enumerate(payloads.items(), CHECKSUM_HEAD):
        sums_R = torch.cat([checksums_RC.new_empty(0), *map(checksums, parts)])
        row = _first(sums_R != checksums_RC[:, column])
        if row is not None:
            source, number = int(sources_R[row]), int(checksums_RC[row, TOKEN])
            token = number if back is None else back.token(number)
            what = f"token {token} of rank {source}"
            if back is not None:
                what = f"the result of {back.name(number)} that rank {source} returned"
            raise Corrupted(
                f"payload {name!r} of {what} is not what was sent",
                expected=f"the bytes that rank {source} sent",
                source=source,
                token=token,
                place=name,
            )


def _check_routes(
    spec: ExchangeSpec,
    rank: int,
    routes: LocalRoutes,
    counts_W: tuple[int, ...],
    sources_R: Tensor,
    checksums_RC: Tensor,
) -> None:
    """Raise unless the ids and weights that arrived are those that the copy of the global routes gives here."""
    copy_RK = checksums_RC[:, -spec.top_k :]
    ids_RK, bits_RK = (copy_RK << 32) >> 32, copy_RK >> 32
    unknown_R = ((ids_RK < -1) | (ids_RK >= spec.num_experts)).any(dim=1)
    ids_RK[unknown_R] = -1
    resolved = [spec.placement.resolve(ids, source) for source, ids in enumerate(ids_RK.split(counts_W))]
    rank_RK, local_RK = (torch.cat(parts) for parts in zip(*resolved, strict=True))
    here_RK = rank_RK == rank
    due_ids_RK, due_bits_RK = torch.where(here_RK, local_RK, -1), torch.where(here_RK, bits_RK, 0)
    found_bits_RK = routes.weights_RK.float().view(torch.int32).long()
    wrong = {
        "ids": unknown_R | (routes.ids_RK.long() != due_ids_RK.long()).any(dim=1),
        "weights": (found_bits_RK != due_bits_RK).any(dim=1),
    }
    for name, wrong_R in wrong.items():
        if (row := _first(wrong_R)) is not None:
            source, token = int(sources_R[row]), int(checksums_RC[row, TOKEN])
            here = {"ids": routes.ids_RK, "weights": routes.weights_RK}[name]
            raise Corrupted(
                f"payload {name!r} of token {token} of rank {source} is {here[row].tolist()}, not what was sent",
                expected=f"the routes that rank {source} sent, with the local ids of this rank",
                source=source,
                token=token,
                place=name,
            )


# -- The way back ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ResultNumbers:
    """How results are numbered, so that the rank that sums them knows whose they are."""

    per_token: int = 1  # numbers for each token: K if each of its choices has a result
    with_source: bool = False  # whether they hold the source rank: a relay sums tokens of several ranks

    def of(self, heads_RC: Tensor) -> Tensor:
        """The numbers of the results of rows with these heads: the token, or the source rank above the token."""
        numbers_R = heads_RC[:, TOKEN]
        return numbers_R | heads_RC[:, SOURCE] << _TOKEN_BITS if self.with_source else numbers_R

    def token(self, number: int) -> int:
        """The token that a result belongs to."""
        return (number & (1 << _TOKEN_BITS) - 1 if self.with_source else number) // self.per_token

    def name(self, number: int) -> str:
        """That token in words, with its source rank if the number holds it."""
        source = f" of rank {number >> _TOKEN_BITS}" if self.with_source else ""
        return f"token {self.token(number)}{source}"


def checksums_back(rank: int, round: int, results_R: Tensor, payloads: Mapping[str, Tensor]) -> Tensor:
    """The checksums, `[R, C]`, of results with these numbers that rank `rank` returns."""
    sums = [checksums(payload) for payload in payloads.values()]
    return torch.stack([*_head(rank, results_R, round), *sums], dim=1)


def check_back(
    peer: int, round: int, results_N: Tensor, rows: EncodedRows, numbers: ResultNumbers
) -> EncodedRows:
    """The rows that a rank returned, without their checksums; raise unless they are the results with these numbers."""
    checksums_NC = rows.payloads[CHECKSUMS]
    payloads = {name: payload for name, payload in rows.payloads.items() if name != CHECKSUMS}
    peers_N = torch.full_like(results_N, peer)
    fits = len(checksums_NC) == len(results_N)
    head_NC = torch.stack(_head(peer, results_N, round), dim=1)
    row = _first((checksums_NC[:, :CHECKSUM_HEAD] != head_NC).any(dim=1)) if fits else 0
    if row is not None:
        number = int(results_N[row]) if len(results_N) else None
        due = "no token" if number is None else numbers.name(number)
        head = checksums_NC[row, :CHECKSUM_HEAD].tolist() if len(checksums_NC) else [-1, -1, -1]
        source, other, when = head
        choice = f"choice {other % numbers.per_token} of " if numbers.per_token > 1 else ""
        what = f"what rank {source} computed for {choice}{numbers.name(other)} in round {when}"
        if head == [-1, -1, -1]:
            what = "nothing"
        raise Corrupted(
            f"rank {peer} returned {what} as the result of {due}",
            expected=f"the result of {due}{'' if numbers.with_source else ' of this rank'}, of round {round}, "
            f"from rank {peer}",
            source=peer,
            token=None if number is None else numbers.token(number),
            place="order",
        )
    parts = {name: [payload] for name, payload in payloads.items()}
    _check_sums(parts, peers_N, checksums_NC, back=numbers)
    return EncodedRows(format=rows.format, hidden_size=rows.hidden_size, payloads=payloads)


def _head(rank: int, tokens_N: Tensor, round: int) -> list[Tensor]:
    return [torch.full_like(tokens_N, rank), tokens_N, torch.full_like(tokens_N, round)]


def _first(wrong_N: Tensor) -> int | None:
    """The first row that is wrong, None if none is."""
    return int(wrong_N.nonzero()[0]) if bool(wrong_N.any()) else None
