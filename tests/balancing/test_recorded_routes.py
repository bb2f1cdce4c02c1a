"""Routes of a run: written, read, assigned to other numbers of ranks, and refused where a file does not fit."""

import json

import pytest
import torch

from tests.balancing.test_balance import recorded
from tests.cli.runner import call
from tokenyard.balancing.recorded_routes import read_routes, write_routes
from tokenyard.checkpoints import write_tensors
from tokenyard.errors import InputError
from tokenyard.routing import Placement


def test_other_numbers_of_ranks_get_the_tokens_of_a_step_in_turn():
    # One step of three tokens, all for expert 0, which lives on both ranks: a token stays where it is.
    routes = recorded([[0], [0], [0]], [[3]])
    both = Placement.explicit(4, [[0, 1], [0, 2, 3]])
    assert routes.rows_by_rank(both) == [2, 1]


def test_layers_stand_in_the_order_of_their_numbers(tmp_path):
    import dataclasses

    file = tmp_path / "routes.safetensors"
    one = recorded([[0]], [[1]])
    write_routes(file, [dataclasses.replace(one, layer=f"layers.{n}.mlp") for n in (10, 9, 2)])
    assert [routes.layer for routes in read_routes(file)] == ["layers.2.mlp", "layers.9.mlp", "layers.10.mlp"]


@pytest.mark.parametrize(
    "changes",
    [
        {"moe.ids": None},
        {"moe.ids": torch.zeros(1, 1)},
        {"moe.weights": torch.zeros(1, 2)},
        {"moe.counts": torch.tensor([[2]], dtype=torch.int32)},
        {"moe.counts": torch.tensor([1], dtype=torch.int32)},
        {"moe.sizes": torch.tensor([4, 10])},
        {"moe.ids": torch.tensor([[4]], dtype=torch.int32)},
        {"moe.ids": None, "moe.weights": None, "moe.counts": None, "moe.sizes": None},
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, changes):
    tensors = {
        "moe.ids": torch.zeros(1, 1, dtype=torch.int32),
        "moe.weights": torch.ones(1, 1),
        "moe.counts": torch.ones(1, 1, dtype=torch.int32),
        "moe.sizes": torch.tensor([4, 10, 20, 1200]),
    }
    file = tmp_path / "routes.safetensors"
    write_tensors(file, tensors)
    assert read_routes(file)[0].expert_bytes == 1200
    write_tensors(
        file, {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
    )
    with pytest.raises(InputError, match="fix:"):
        read_routes(file)


def test_the_command_says_gains_costs_and_placements(tmp_path):
    file = tmp_path / "routes.safetensors"
    write_routes(file, [recorded([[0, 1], [0, 1], [0, 1], [2, 3]], [[1, 1], [2, 0]])])
    saved = tmp_path / "balance.json"
    rates = ("--bandwidth", "1", "--tflops", "0.001")
    result = call("balance", str(file), *rates, "--out", str(saved), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (layer,) = document["layers"]
    assert (layer["before"], layer["after"], layer["experts_moved"]) == (1.5, 1.0, 2)
    assert Placement.explicit(**layer["placement"]) != Placement.explicit(**layer["present"])
    assert layer["rows_after"] == [4, 4]
    assert document["steps_to_pay"] == 1
    assert json.loads(saved.read_text())["layers"] == document["layers"]
    shown = call("balance", str(file), *rates, "--ranks", "2", "--replicas", "2")
    assert "1.500" in shown.output
    assert "paid for itself after" in shown.output


def test_the_command_measures_what_it_is_not_told(tmp_path):
    file = tmp_path / "routes.safetensors"
    write_routes(file, [recorded([[0, 1]], [[1, 0]])])
    document = json.loads(call("balance", str(file), "--json").stdout)
    assert document["bandwidth_GB_per_s"] > 0
    assert document["TFLOP_per_s"] > 0
    assert document["ranks"] == 2
