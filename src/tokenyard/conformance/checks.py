"""All checks by name: those that every exchange, every format and every experts class must pass."""

from __future__ import annotations

from tokenyard.conformance import (
    exchange_accounts,
    exchange_duties,
    exchange_errors,
    exchange_losses,
    exchange_suite,
    experts_suite,
    format_suite,
)
from tokenyard.conformance.runner import checks_of

EXCHANGE_CHECKS = checks_of(
    exchange_suite,
    exchange_duties,
    exchange_accounts,
    exchange_errors,
    exchange_losses,
    parameters=["trial"],
)
FORMAT_CHECKS = checks_of(format_suite, parameters=["format"])
EXPERTS_CHECKS = checks_of(experts_suite, parameters=["cls", "device"])
