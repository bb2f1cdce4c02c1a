"""The one-sided exchange: push dispatch and pull combine through a symmetric workspace."""

from tokenyard.exchange.one_sided.exchange import OneSidedExchange, Workspace

__all__ = ["OneSidedExchange", "Workspace"]
