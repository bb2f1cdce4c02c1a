"""vLLM's FlashInfer one-sided manager, its prepare and finalize, unchanged, on our `MoeAlltoAll`, in two processes."""

import json

import tokenyard as ty
from tests.integrations.flashinfer.signatures import STORED, read_wheel
from tests.vllm_engines.flashinfer_ranks import (
    HIDDEN,
    MOST,
    TOKENS,
    TOP_K,
    managed,
    managed_low_precision,
    wheel,
)


def test_the_stored_signatures_are_those_of_the_wheel():
    """If it fails: `python -m tests.integrations.flashinfer.signatures WHEEL`, and follow what changed."""
    assert json.loads(STORED.read_text()) == read_wheel(wheel())


def test_round_trips_of_layers_on_one_manager():
    rows = 2 * max(TOKENS)
    assert max(TOKENS) < MOST
    for found in ty.launch(2, managed, ranks="processes"):
        assert found.pop("class") == "tokenyard.integrations.flashinfer.all_to_all.MoeAlltoAll"
        assert found.pop("low") is False
        assert found.pop("shapes") == [(rows, HIDDEN), (rows, TOP_K), None]
        assert found.pop("mxfp8 shapes") == [(rows, HIDDEN), (rows, TOP_K), (rows, HIDDEN // 32)]
        assert found == {
            "output": True,
            "bf16": True,
            "same workspace": True,
            "mxfp8": True,
            "rebuilt": True,
            "after a checkpoint": True,
            "cleaned up": True,
        }


def test_the_switch_for_low_precision():
    assert ty.launch(2, managed_low_precision, ranks="processes") == [(True, True)] * 2
