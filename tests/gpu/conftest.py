"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

import pytest


@pytest.fixture
def specialized_launches(monkeypatch):
    """The layers whose products were launched as `kernels.specialized`."""
    from tokenyard.experts.fused import launch_hopper

    launched, original = [], launch_hopper.launch_specialized

    def noting(call, *arguments, **options):
        launched.append(call.spec)
        return original(call, *arguments, **options)

    monkeypatch.setattr(launch_hopper, "launch_specialized", noting)
    return launched
