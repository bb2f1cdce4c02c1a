"""All checks of the exchange suite, by name."""

from __future__ import annotations

from tokenyard.conformance.exchange_accounts import ACCOUNT_CHECKS
from tokenyard.conformance.exchange_duties import DUTY_CHECKS
from tokenyard.conformance.exchange_errors import ERROR_CHECKS
from tokenyard.conformance.exchange_losses import LOSS_CHECKS
from tokenyard.conformance.exchange_suite import MOVEMENT_CHECKS

EXCHANGE_CHECKS = {
    check.__name__: check
    for check in (*MOVEMENT_CHECKS, *DUTY_CHECKS, *ACCOUNT_CHECKS, *ERROR_CHECKS, *LOSS_CHECKS)
}
