"""`auto`: choose the fastest experts and the fastest exchange that support a layer, and say why they were chosen.

Experts: `fused` on GPUs that run them, `grouped` elsewhere. Exchange: `local` where one CPU rank has all experts,
`one_sided` where the ranks share memory, `hierarchical` where they do so inside hosts, else the next one that reaches
all of them. An exchange that does not support one of the layers is skipped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenyard.errors import Reason
from tokenyard.exchange import EXCHANGES, LocalTransport, Transport
from tokenyard.experts import EXPERTS, Experts, ExpertsSpec

AUTO = "auto"
# The exchanges between ranks, the fastest first.
_BY_SPEED = ("one_sided", "hierarchical", "two_sided", "allgather")


def choose_experts(spec: ExpertsSpec, device: torch.device | None) -> tuple[type[Experts], str]:
    """The experts for a layer whose rows live on this device, and why. For device None, a CPU is assumed."""
    if device is None or device.type == "cpu":
        return EXPERTS["grouped"], "on CPUs"
    refused = EXPERTS["fused"].runs_on(device) or EXPERTS["fused"].supports(spec)
    if refused is None:
        return EXPERTS["fused"], "this GPU runs them"
    return EXPERTS["grouped"], f"not fused: {refused.why}"


def choose_exchange(
    refusal: Callable[[type[Transport]], Reason | None],
    world: int,
    device: torch.device | None,
    *,
    why: str = "the ranks share memory",
) -> tuple[type[Transport], str]:
    """The fastest exchange that `refusal` does not refuse, and why it was chosen.

    If all are refused, it is the fastest one, whose refusal then becomes the error of the plan. `device` is where the
    rows of the `world` ranks live; for None, a CPU is assumed. `why` is the reason if the first one is not refused.
    """
    on_cpu = device is None or device.type == "cpu"
    if world == 1 and on_cpu and refusal(LocalTransport) is None:
        return LocalTransport, "one rank"
    passed_over = ""
    for name in _BY_SPEED:
        reason = refusal(EXCHANGES[name])
        if reason is None:
            return EXCHANGES[name], passed_over or why
        passed_over = passed_over or reason.why
    return EXCHANGES[_BY_SPEED[0]], "no other one does it"
