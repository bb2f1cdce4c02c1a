"""What a call of `MoeAlltoAll` brings, and the checks that one rank can make of it alone.

A `Manifest` is the dtypes and shapes of a call. Ranks compare the texts of manifests, so a text names all
that must be the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from tokenyard.errors import InputError
from tokenyard.formats import EncodedRows, Format, Payload, for_dtype
from tokenyard.formats.base import dtype_name, is_tensor, same_device
from tokenyard.group.base import Group
from tokenyard.rows import describe


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one call brings: dtype and shape of each payload's rows, and the most tokens that a rank may have."""

    phase: str
    rows: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    max_tokens: int
    statistics: bool = False  # whether EPLB statistics come along

    @classmethod
    def of_payloads(
        cls, payloads: Sequence[Tensor], max_tokens: int, *, statistics: bool = False
    ) -> Manifest:
        """The manifest of a dispatch of these tensors."""
        rows = tuple((payload.dtype, tuple(payload.shape[1:])) for payload in payloads)
        return cls(phase="dispatch", rows=rows, max_tokens=max_tokens, statistics=statistics)

    @classmethod
    def of_results(cls, hidden_size: int, dtype: torch.dtype, max_tokens: int) -> Manifest:
        """The manifest of a combine of results of this width and dtype."""
        return cls(phase="combine", rows=((dtype, (hidden_size,)),), max_tokens=max_tokens)

    def wire(self) -> PayloadSet:
        """The wire of a dispatch: each payload as a matrix with a row per token."""
        return PayloadSet(
            entries=tuple(
                Payload(name=f"payload {number}", dtype=dtype, width=math.prod(shape))
                for number, (dtype, shape) in enumerate(self.rows)
            )
        )

    def __str__(self) -> str:
        rows = ", ".join(f"{dtype_name(dtype)}{list(shape)}" for dtype, shape in self.rows)
        statistics = ", with eplb_local_stats" if self.statistics else ""
        return f"{rows} a row, runtime_max_tokens_per_rank {self.max_tokens}{statistics}"


@dataclass(frozen=True, kw_only=True)
class PayloadSet(Format):
    """The caller's payloads as a wire: bytes that travel unchanged. It cannot encode or decode numbers."""

    name = "payload set"
    entries: tuple[Payload, ...]

    def payloads(self, hidden_size: int) -> tuple[Payload, ...]:
        return self.entries

    def encode(self, x_TH: Tensor) -> EncodedRows:
        """Payloads of zeros, as many rows as `x_TH` has, to warm up kernels with. The values of `x_TH` are not used."""
        payloads = {
            entry.name: torch.zeros(x_TH.shape[0], entry.width, dtype=entry.dtype, device=x_TH.device)
            for entry in self.entries
        }
        return EncodedRows(format=self, hidden_size=x_TH.shape[1], payloads=payloads)

    def decode(self, rows: EncodedRows, dtype: torch.dtype = torch.float32) -> Tensor:
        raise NotImplementedError("a payload set has no numbers to decode")


def as_matrix(payload: Tensor) -> Tensor:
    """A payload `[T, ...]` as `[T, width]`."""
    return payload.detach().reshape(payload.shape[0], math.prod(payload.shape[1:]))


def check_whole(name: str, value: object, *, least: int, most: int | None = None) -> int:
    """Raise unless a value is a whole number in this range."""
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most) or isinstance(value, bool):
        raise InputError(
            f"{name} is {value!r}",
            expected=f"a whole number, {least} or more"
            if most is None
            else f"{least} to max_num_tokens={most}",
            fix="pass such a number" if most is None else "make MoeAlltoAll with a larger max_num_tokens",
        )
    return number


def check_place(group: Group, **claims: object) -> None:
    """Raise unless what a caller says of its place (`ep_rank=3`, `ep_size=4`) is what the group says."""
    for name, value in claims.items():
        of_group = group.size if name.endswith("size") else group.rank
        if value != of_group:
            raise InputError(
                f"{name} is {value!r}",
                expected=f"{of_group}, as the group says",
                fix="pass the group of the EP ranks",
            )


def check_backend(backend: object) -> None:
    """Raise unless `backend` is FlashInfer's default: tokenyard always moves rows with its own kernels."""
    if backend != "trtllm":
        raise InputError(
            f"backend is {backend!r}",
            expected="'trtllm', the default: tokenyard moves rows with kernels of its own, one set for all",
            fix="leave backend out",
        )


def check_statistics(stats: object, num_experts: int, device: torch.device) -> None:
    """Raise unless `stats` is None, or EPLB statistics of a rank whose `MoeAlltoAll` was made for them."""
    if stats is None:
        return
    if num_experts == 0:
        raise InputError(
            "eplb_local_stats are given, and eplb_stats_num_experts is 0",
            expected="a MoeAlltoAll that was made for them",
            fix="make it with eplb_stats_num_experts=len(eplb_local_stats)",
        )
    kind = torch.device(device.type)
    if not is_tensor(stats, shape=(num_experts,), dtypes=(torch.int32,), device=kind):
        raise InputError(
            f"eplb_local_stats is {describe(stats, device=True)}",
            expected=f"int32[{num_experts}] on {device}, as eplb_stats_num_experts says",
            fix="count the tokens of each expert with torch.bincount(…, minlength=eplb_stats_num_experts).int()",
        )


def check_batch(
    ids_TK: object,
    payloads: Sequence[Tensor],
    top_k: int,
    num_experts: int | None,
    max_tokens: int,
    device: torch.device,
) -> None:
    """Raise unless ids and payloads are those of at most `max_tokens` tokens. `num_experts` None: any ids."""
    if not is_tensor(ids_TK, shape=(None, top_k), dtypes=(torch.int32, torch.int64)):
        raise InputError(
            f"token_selected_experts is {describe(ids_TK)}",
            expected=f"int32 or int64 [T, {top_k}]: top_k ids for each token",
            fix="pass the router's ids, -1 where a choice has no expert",
        )
    if not same_device(ids_TK.device, device):
        raise InputError(
            f"token_selected_experts is on {ids_TK.device}",
            expected=f"{device}, where the group moves bytes",
            fix="move it there first, and the payloads as well",
        )
    if ids_TK.shape[0] > max_tokens:
        raise InputError(
            f"{ids_TK.shape[0]} tokens on this rank",
            expected=f"at most runtime_max_tokens_per_rank={max_tokens}",
            fix="pass the largest number of tokens that any rank of the group has",
        )
    if num_experts is not None and bool((outside_TK := (ids_TK < -1) | (ids_TK >= num_experts)).any()):
        token, choice = outside_TK.nonzero()[0].tolist()
        raise InputError(
            f"token_selected_experts holds id {int(ids_TK[token, choice])} (token {token}, choice {choice})",
            expected=f"ids from 0 to {num_experts - 1}, or -1 for no expert",
            fix="pass global expert ids, and -1 for padding",
        )
    if not isinstance(payloads, (list, tuple)) or not payloads:
        raise InputError(
            f"input_payloads is {describe(payloads)}",
            expected="a list of at least one tensor",
            fix="pass the rows, and whatever belongs to them, as [rows, …]",
        )
    for number, payload in enumerate(payloads):
        fits = isinstance(payload, Tensor) and payload.shape[:1] == ids_TK.shape[:1]
        if not fits or payload.device != ids_TK.device:
            raise InputError(
                f"input_payloads[{number}] is {describe(payload, device=True)}",
                expected=f"a tensor [{ids_TK.shape[0]}, ...] on {ids_TK.device}: one row for each token",
                fix="pass the payloads of the same tokens as token_selected_experts",
            )


def check_marks(payloads: Sequence[Tensor], invalid_id: int | None, number: int | None) -> None:
    """Raise unless unused slots can be marked with this id in this payload. None and None: no mark."""
    if invalid_id is None and number is None:
        return
    fits = invalid_id is not None and number is not None and 0 <= number < len(payloads)
    dtype = payloads[number].dtype if fits and number is not None else None
    if dtype is None or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise InputError(
            f"invalid_token_expert_id is {invalid_id} and expert_id_payload_index is {number}"
            + ("" if dtype is None else f", a payload of {dtype_name(dtype)}"),
            expected=f"both: an id, and which of the {len(payloads)} payloads (from 0) holds ids, as integers",
            fix="pass both or neither",
        )
    bounds = torch.iinfo(dtype)
    if not bounds.min <= check_whole("invalid_token_expert_id", invalid_id, least=-(2**63)) <= bounds.max:
        raise InputError(
            f"invalid_token_expert_id is {invalid_id}",
            expected=f"a value that {dtype_name(dtype)} holds, like the ids of payload {number}",
            fix="send the ids in a wider dtype",
        )


def check_results(payload: object, world: int, max_tokens: int, device: torch.device) -> None:
    """Raise unless a tensor holds a result for each slot of a dispatch."""
    kind = torch.device(device.type)
    if not is_tensor(payload, shape=(world, max_tokens, None), device=kind) or payload.shape[2] == 0:
        raise InputError(
            f"payload is {describe(payload, device=True)}",
            expected=f"a tensor [{world}, {max_tokens}, H] on {device}: a result for each slot of dispatch",
            fix="keep the slots of the tensors that dispatch returned",
        )
    for_dtype(payload.dtype)
