"""What `one_sided` declares on CPUs and GPUs alike: how much memory it needs, and on which groups it can run."""

from __future__ import annotations

import importlib.util
import platform
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from tokenyard.errors import ContractError, Reason
from tokenyard.exchange.batch import Batch, WayBack
from tokenyard.exchange.spec import ExchangeSpec
from tokenyard.exchange.transport import Transport
from tokenyard.exchange.transports.one_sided.cuda.control import MOST_RANKS
from tokenyard.exchange.workspace import LayerBytes, WorkspaceLayout
from tokenyard.group.base import Group

Workspace = TypeVar("Workspace")

# CPUs on which plain aligned stores become visible in the order in which they were made.
_ORDERED_CPUS = ("x86_64", "AMD64", "i686")


def slot_bytes(spec: ExchangeSpec) -> LayerBytes:
    """The memory of a layer whose rows lie in slots, payload by payload."""
    return spec.slot_nbytes


def layout_for(
    needs: Sequence[LayerBytes], *, control: int, in_flight: int, guard: int = 0
) -> WorkspaceLayout:
    """The smallest layout that serves layers with these needs: each region is as large as the largest need."""
    return WorkspaceLayout(
        control=control,
        dispatch=max(need.dispatch for need in needs),
        combine=max(need.combine for need in needs),
        in_flight=in_flight,
        guard=guard,
    )


def watches(group: Group) -> Reason | None:
    """None, or why a plan on this group cannot be paranoid, that is check the memory that its ranks share."""
    if group.device.type != "cuda":
        return None
    why = "the kernels that move rows between GPUs leave no checksums, guards and poison"
    return Reason(field="paranoid", value=True, why=why)


def reaches(group: Group, hosts: Sequence[str], *, in_each: bool = False) -> Reason | None:
    """None, or why the ranks of a group cannot share memory; `in_each`: those of each host."""
    why, most = None, max(Counter(hosts).values())
    if group.device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            why = "one_sided on GPUs needs Triton, which comes with torch for CUDA"
        elif torch.cuda.get_device_capability(group.device) < (8, 9):
            why = "one_sided on GPUs needs one that knows fp8: compute capability 8.9 or higher"
        elif most > MOST_RANKS:
            why = f"one_sided on GPUs serves up to {MOST_RANKS} ranks, not {most}"
    elif platform.machine() not in _ORDERED_CPUS:
        why = f"one_sided needs stores that stay in order, as on x86, not {platform.machine()}"
    if why is None and len(set(hosts)) > 1 and not in_each:
        why = f"one_sided shares memory, and the ranks run on {len(set(hosts))} hosts"
    return None if why is None else Reason(field="exchange", value="one_sided", why=why)


class OneSided(Transport[WayBack], Generic[Workspace, WayBack]):
    """What the transports on CPUs and on GPUs declare alike; each of them moves rows in its own way."""

    name = "one_sided"
    _workspace: Workspace | None = None
    _control_bytes: int  # of a rank's control region

    @classmethod
    def reaches(cls, group: Group, hosts: Sequence[str]) -> Reason | None:
        return reaches(group, hosts)

    @classmethod
    def watches(cls, group: Group) -> Reason | None:
        return watches(group)

    @classmethod
    def region_bytes(cls, spec: ExchangeSpec) -> LayerBytes:
        return slot_bytes(spec)

    @property
    def workspace(self) -> Workspace:
        """The workspace of the layers that are served now."""
        if self._workspace is None:
            raise ContractError(
                "the exchange has no workspace", expected="a plan that is open", fix="make a new plan"
            )
        return self._workspace

    def layout_for(self, specs: Sequence[ExchangeSpec]) -> WorkspaceLayout:
        """The smallest layout that serves these layers: the union of what they need."""
        return layout_for(
            [self.region_bytes(spec) for spec in specs],
            control=self._control_bytes,
            in_flight=self.in_flight,
            guard=self.guard,
        )

    def check_slots(self, specs: Sequence[ExchangeSpec]) -> None:
        """Make the views of every layer's slots once, to raise now if a layer does not fit into the workspace."""
        for spec in specs:
            for region in range(self.in_flight):
                try:
                    self.view_slots(spec, region)
                except ContractError as error:
                    error.at(layer=spec.layer, rank=self.group.rank)
                    raise

    @abstractmethod
    def view_slots(self, spec: ExchangeSpec, region: int) -> None:
        """Make the views of a layer's slots in this rank's workspace."""

    def bytes_sent(self, batch: Batch, rows: Sequence[int]) -> list[int]:
        row = self.region_bytes(batch.spec).dispatch_row
        return [count * row for count in rows]
