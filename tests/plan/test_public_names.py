"""The names that users need, and what a program loads that uses no more."""

import importlib
import inspect
import subprocess
import sys

import pytest

import tokenyard as ty

PACKAGE = [
    *("DistributedGroup", "ExpertWeights", "Group", "LayerSpec", "MoELayer", "PeerLost", "Plan", "Routes"),
    *("TokenyardError", "__version__", "draft", "launch", "load_experts", "plan"),
]
PLAN = [
    *(
        "close",
        "extend",
        "fixed_shapes",
        "layer",
        "load",
        "local_experts",
        "stats",
        "synchronize",
        "trim",
        "wiring",
    ),
    *("draft", "exchange", "group", "mesh", "training"),  # what it is made of
    "gradient_divisor",
    *("autobalance", "go_on_without", "grow", "readmit", "rebalance", "shrink"),  # how it changes
]


def test_the_package_has_the_names_that_most_programs_need():
    assert sorted(ty.__all__) == sorted(dir(ty)) == PACKAGE
    assert all(getattr(ty, name) is not None for name in PACKAGE)


def test_a_plan_has_these_public_members():
    assert sorted(name for name in dir(ty.Plan) if not name.startswith("_")) == sorted(PLAN)


@pytest.mark.parametrize(("topic", "names"), ty._ELSEWHERE.items())
def test_a_name_that_is_elsewhere_says_where(topic, names):
    module = importlib.import_module(f"tokenyard.{topic}")
    for name in names.split():
        assert getattr(module, name) is not None
        with pytest.raises(AttributeError, match=f"write `from tokenyard.{topic} import {name}`"):
            getattr(ty, name)


def test_what_is_nowhere_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'tokenyard' has no attribute 'Plam'$"):
        _ = ty.Plam


NO_MOVES = """
import sys
import tokenyard
assert "torch" not in sys.modules, "import tokenyard loads torch"
import torch
from tokenyard import ExpertWeights, LayerSpec, Routes, launch, plan

def rank_main(group):
    spec = LayerSpec(name="moe", hidden_size=32, intermediate_size=16, num_experts=4, top_k=1, max_tokens=4)
    agreed = plan([spec], group)
    weights = ExpertWeights(w13=torch.ones(4, 32, 32).bfloat16(), w2=torch.ones(4, 32, 16).bfloat16())
    layer = agreed.layer("moe", weights)
    ids_TK = torch.zeros(2, 1, dtype=torch.int64)
    layer(torch.ones(2, 32).bfloat16(), Routes(topk_ids_TK=ids_TK, topk_weights_TK=torch.ones(2, 1)))
    agreed.extend([])
    agreed.stats()
    agreed.close()

launch(2, rank_main)
print([name for name in sys.modules if name.startswith("tokenyard.elastic")])
"""


def test_a_plan_that_never_changes_does_not_load_what_changes_it():
    done = subprocess.run(
        [sys.executable, "-c", NO_MOVES], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_methods_that_change_a_plan_are_one_line():
    for name in ("autobalance", "go_on_without", "grow", "readmit", "rebalance", "shrink"):
        body = inspect.getsource(getattr(ty.Plan, name)).rpartition('"""')[2].strip()
        assert body.removeprefix("return ").startswith(("self._changing().", "self._moves().")), name
        assert "\n" not in body, name
