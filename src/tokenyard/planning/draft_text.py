"""The description of a draft's layers: as text for `print(plan)`, and as plain values for tables and JSON."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from tokenyard.exchange import ExchangeSpec, HostMap
from tokenyard.exchange.workspace import LayerBytes
from tokenyard.planning.gradients import GradientWiring
from tokenyard.planning.wiring import Wiring
from tokenyard.units import count, size, span

# The most links between hosts that `print(plan)` shows one by one: those between three hosts.
_MOST_LINKS = 6


def describe_wiring(wiring: Wiring, region_bytes: Callable[[ExchangeSpec], LayerBytes]) -> dict[str, Any]:
    """A layer's shape, formats, duties and bytes, without its name, so that layers that are alike have the same."""
    spec, nbytes = wiring.spec, region_bytes(wiring.exchange_spec)
    row = {
        "shape": f"H {spec.hidden_size}, I {spec.intermediate_size}, E {spec.num_experts}, K {spec.top_k}",
        "experts": f"{wiring.experts.name}{chosen(wiring.experts_reason)}, "
        f"{spec.weights} weights{_between(wiring)}, "
        f"{wiring.exchange_spec.placement}"
        + (f", memory for {spec.spare_experts} more on each" if spec.spare_experts else ""),
        "wire": str(wiring.wire),
        "combine_wire": str(wiring.exchange_spec.combine_wire),
        "duties": {duty.value: party.value for duty, party in wiring.duties.items()},
        "max_tokens": wiring.exchange_spec.max_tokens,
        "max_rows": wiring.exchange_spec.max_rows,
        "bytes_per_row": {"dispatch": nbytes.dispatch_row, "combine": nbytes.combine_row},
        "bytes_per_rank": {"dispatch": nbytes.dispatch, "combine": nbytes.combine},
        "links": links(wiring.exchange_spec),
        "sum": spec.sum,
        "rows_home": round(spec.top_k / ranks_per_token(wiring.exchange_spec), 2)
        if wiring.exchange_spec.sums_choices
        else 1.0,
    }
    if wiring.gradients is not None:
        row["gradients"] = _describe_gradients(wiring.gradients, spec.keep, region_bytes)
    return row


def _describe_gradients(
    gradients: GradientWiring, keep: str, region_bytes: Callable[[ExchangeSpec], LayerBytes]
) -> dict[str, Any]:
    nbytes = region_bytes(gradients.exchange_spec)
    return {
        "wire": str(gradients.exchange_spec.wire),
        "keep": keep,
        "duties": {duty.value: party.value for duty, party in gradients.duties.items()},
        "bytes_per_row": {"dispatch": nbytes.dispatch_row, "combine": nbytes.combine_row},
        "bytes_per_rank": {"dispatch": nbytes.dispatch, "combine": nbytes.combine},
    }


def _lines_of_gradients(gradients: dict[str, Any]) -> list[str]:
    per_row, per_rank = gradients["bytes_per_row"], gradients["bytes_per_rank"]
    return [
        f"    gradients {gradients['wire']} ({per_row['dispatch']} bytes a row), back {gradients['wire']} "
        f"({per_row['combine']}); a forward keeps {gradients['keep']}",
        f"      {_told(gradients['duties'])}",
        f"      at most {size(per_rank['dispatch'])} out + {size(per_rank['combine'])} back on a rank",
    ]


def _told(duties: dict[str, str]) -> str:
    return ", ".join(f"{duty}: {who}" for duty, who in duties.items() if who != "–")


def lines_of_row(row: dict[str, Any]) -> list[str]:
    """The lines that `print(plan)` shows for all layers that share one description."""
    per_row, per_rank = row["bytes_per_row"], row["bytes_per_rank"]
    lines = [
        f"  {span(row['layers'])}: {row['shape']}; {row['experts']}",
        f"    wire {row['wire']} ({per_row['dispatch']} bytes a row), "
        f"back {row['combine_wire']} ({per_row['combine']}); up to {row['max_tokens']} tokens a rank",
        f"    {_told(row['duties'])}",
    ]
    if row["sum"] != "ranks":
        lines.append(
            f'    the result of each choice comes home: {row["rows_home"]:.2f} times the rows of sum="ranks", where '
            "routes are uniform"
        )
    lines.append(
        f"    at most {size(per_rank['dispatch'])} out + {size(per_rank['combine'])} back on a rank"
        + ("" if row["max_rows"] is None else f", {row['max_rows']} rows a pass (max_rows)")
    )
    lines += [
        f"    from host {link['from']} to host {link['to']}: at most {count(link['rows'], 'row')} out "
        f"({size(link['dispatch'])}), as many back ({size(link['combine'])})"
        for link in row["links"][:_MOST_LINKS]
    ]
    if len(row["links"]) > _MOST_LINKS:
        lines.append(f"    and {len(row['links']) - _MOST_LINKS} more links between hosts")
    return lines + (_lines_of_gradients(row["gradients"]) if "gradients" in row else [])


def chosen(reason: str | None) -> str:
    """The reason why `auto` chose an exchange or experts, in parentheses; empty if the user named them."""
    return "" if reason is None else f" (auto: {reason})"


def links(spec: ExchangeSpec) -> list[dict[str, int]]:
    """The most rows and bytes that cross from each host to each other one in a call of a layer: a row for each token.

    Bytes are those of rows, `dispatch` out and `combine` back. The list is empty if hosts are not known.
    """
    if not spec.hosts:
        return []
    ranks = HostMap(spec.hosts).ranks
    return [
        {
            "from": source,
            "to": target,
            "rows": len(ranks[source]) * spec.max_tokens,
            "dispatch": len(ranks[source]) * spec.max_tokens * spec.dispatch_layout.stride,
            "combine": len(ranks[source]) * spec.max_tokens * spec.combine_layout.stride,
        }
        for source in range(len(ranks))
        for target in range(len(ranks))
        if source != target
    ]


def ranks_per_token(spec: ExchangeSpec) -> float:
    """The ranks that a token's choices go to, on average over sources, where all sets of K experts are equally likely.

    >>> import torch
    >>> from dataclasses import replace
    >>> from tokenyard.formats import for_dtype
    >>> from tokenyard.routing import Placement
    >>> bf16, none = for_dtype(torch.bfloat16), torch.bfloat16
    >>> spec = ExchangeSpec(layer="moe", index=0, hidden_size=8, num_experts=256, top_k=8, max_tokens=1, dtype=none,
    ...                     wire=bf16, combine_wire=bf16, placement=Placement.contiguous(256, 8))
    >>> round(8 / ranks_per_token(spec), 2)
    1.51
    >>> round(8 / ranks_per_token(replace(spec, placement=Placement.contiguous(256, 64))), 2)
    1.04
    """
    placement, experts = spec.placement, spec.num_experts
    # The copies of an expert share its tokens equally; but a copy on the source rank takes all tokens of that rank.
    shares = [[0.0] * placement.world for _ in range(placement.world if placement.has_replicas else 1)]
    for source, shares_W in enumerate(shares):
        for expert in range(experts):
            owners = [rank for rank, _ in placement.owners(expert)]
            owners = [source] if placement.has_replicas and source in owners else owners
            for rank in owners:
                shares_W[rank] += 1 / len(owners)
    chosen = min(spec.top_k, experts)

    def met(share: float) -> float:
        """The probability that a token chooses at least one of `share` experts, which may be a fraction."""
        return 1 - prod(max(0.0, 1 - share / (experts - k)) for k in range(chosen))

    return max(1.0, sum(met(share) for shares_W in shares for share in shares_W) / len(shares))


def _between(wiring: Wiring) -> str:
    """The words for the inner format, between an expert's two products; empty if it is exact."""
    return "" if wiring.inner is None else f", {wiring.inner} between the products"
