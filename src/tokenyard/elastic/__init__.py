"""Plans that change while they serve: experts that move, ranks that come and go, calls that survive a lost rank."""

from tokenyard.elastic.joining import join_plan, take_over
from tokenyard.elastic.rebalancing import Rebalance

__all__ = ["Rebalance", "join_plan", "take_over"]
