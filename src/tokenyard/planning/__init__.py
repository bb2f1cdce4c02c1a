"""Planning: the spec of a layer, its wiring, and the plan that all ranks agree on before the first token.

`spec` is what a user asks for, `wiring` assigns every duty of a layer to one party, `drafting` wires all layers
without a group, `planner` agrees on that draft with the other ranks. `audit` counts duties in a paranoid plan.
"""

from tokenyard.planning.drafting import Draft
from tokenyard.planning.planner import gather_stats
from tokenyard.planning.wiring import Wiring

__all__ = ["Draft", "Wiring", "gather_stats"]
