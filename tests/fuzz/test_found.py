"""What fuzzing found, each as one test that is named for it."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import tokenyard as ty
from tests.fuzz.garbage import PECULIAR, Rude, ours
from tests.fuzz.targets import BODY, HEADER, LAYER, ROUTES, SPEC, TAG, X_TH, serve
from tests.models import batch, build, on_ranks, spec
from tokenyard import formats
from tokenyard.checkpoints import open_checkpoint
from tokenyard.errors import CheckpointError, HandleError, InputError, PlanError, UnknownName, shown
from tokenyard.exchange import EXCHANGES
from tokenyard.formats import Payload
from tokenyard.integrations.huggingface import layers_from_config
from tokenyard.routing import Placement, SoftmaxRouter

# -- Layers and plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", b"moe"),
        ("name", ["moe"]),
        ("wire", ""),
        ("wire", 0),
        ("combine_wire", torch.ones(2)),
        ("activation", None),
        ("activation", ["swiglu"]),
        ("bias", "yes"),
        ("weights", 4),
        ("weight_on", np.array(["output", "input"])),
        ("router", "softmax"),
        ("routed_scaling", float("nan")),
        ("routed_scaling", "2.5"),
        ("routed_scaling", 10**400),
        ("payloads", None),
        ("payloads", "tag"),
        ("payloads", (Payload(name="tag", dtype="int64", width=1),)),
        ("payloads", (Payload(name="tag", dtype=torch.int64, width="1"),)),
        ("payloads", (Payload(name=None, dtype=torch.int64, width=1),)),
        ("spare_experts", torch.ones(2)),
        ("hidden_size", 10**5000),
        ("placement", Rude()),
    ],
    ids=lambda value: shown(value, most=30),
)
def test_a_field_of_the_wrong_type_is_a_plan_error_and_no_crash(field, value):
    error = ours(lambda: ty.draft([ty.LayerSpec(**{**SPEC, field: value})], 2))
    assert isinstance(error, (PlanError, UnknownName)), error
    assert field in str(error) or isinstance(error, UnknownName)


@pytest.mark.parametrize("layers", [None, 3, torch.tensor(3), "moe", [None], [[]]], ids=str)
def test_layers_that_are_none(layers):
    assert isinstance(ours(ty.draft, layers, 2), InputError)


@pytest.mark.parametrize("argument", ["world", "in_flight"])
@pytest.mark.parametrize("value", [True, 0, "2", None, 10**9, 2.0])
def test_counts_of_a_plan_are_whole_numbers_with_an_end(argument, value):
    arguments = {"world": 2, "in_flight": 1, argument: value}
    error = ours(ty.draft, [ty.LayerSpec(**SPEC)], **arguments)
    assert isinstance(error, InputError)
    assert f"{argument} is {value!r}" in str(error)


def test_an_exchange_that_cannot_be_hashed_is_refused():
    assert isinstance(ours(ty.draft, [ty.LayerSpec(**SPEC)], 2, exchange=["one_sided"]), InputError)


def test_a_thousand_tries_for_alternatives_share_one_table_of_experts():
    """Each of them made a table of 65,536 experts: minutes, where there are no alternatives to be found."""
    spec = ty.LayerSpec(**{**SPEC, "num_experts": 65536, "wire": "fp32", "combine_wire": "fp32"})
    made, make = 0, Placement.__post_init__

    def counted(self):
        nonlocal made
        made += 1
        make(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Placement, "__post_init__", counted)
        assert isinstance(ours(ty.draft, [spec], 3, max_tokens=1), PlanError)
    # The layer as it is, for each exchange that `auto` asks; and contiguous and round_robin for all tries.
    assert made <= len(EXCHANGES) + 2


def test_an_expert_that_is_twice_on_a_rank_is_found_at_once():
    started = time.process_time()
    error = ours(Placement.explicit, 60_000, [[*range(60_000), 59_999]])
    assert "holds expert 59999 more than once" in str(error)
    assert time.process_time() - started < 20  # seconds; counting each of them by hand took 60,000² steps


@pytest.mark.parametrize("table", [5, None, [[0], 3], [["a"]], Rude(), [[0.5]]], ids=shown)
def test_a_table_that_is_none(table):
    assert isinstance(ours(Placement.explicit, 1, table), InputError)
    assert isinstance(ours(Placement.replicated, Placement.contiguous(2, 2), table), InputError)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": "2"},
        {"top_k": True},
        {"renormalize": None},
        {"routed_scaling": "1"},
        {"routed_scaling": 10**400},
    ],
    ids=str,
)
def test_settings_of_a_router_of_the_wrong_type(settings):
    assert isinstance(ours(SoftmaxRouter, **{"top_k": 2, "renormalize": True, **settings}), InputError)


def test_a_number_too_long_to_be_written_in_a_config():
    error = ours(layers_from_config, {"model_type": "mixtral", "hidden_size": 10**5000})
    assert isinstance(error, InputError)


UNREADABLE = [
    "(" * 3000,
    "alignment=" + "-" * 100_000 + "1",
    "alignment=" + "9" * 5000,
    "alignment=9" * 999,
    "alignment=1, alignment=2",
    "alignment==32",
    "alignment=[32]",
    "alignment='32'",
    "256",
    "=",
    ",",
    "**{}",
    "\0=1",
]


@pytest.mark.parametrize("inside", UNREADABLE, ids=lambda text: shown(text, most=24))
def test_parameters_of_a_format_that_cannot_be_read(inside):
    """Python's own parser ran out of memory on some of these."""
    assert isinstance(ours(formats.get, f"mxfp8({inside})"), (InputError, UnknownName))


def test_formats_are_read_by_many_threads_at_a_time():
    """Python's own parser raised SystemError in one of them, now and then."""
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: formats.get("mxfp8(alignment=256)"), range(4000)))
    assert found == {formats.get("mxfp8( alignment = 256 )")}


# -- Calls ---------------------------------------------------------------------------------------------------

REFUSED = {
    "meta": {"x_TH", "ids", "weights", "tag", "out", "add"},
    "sparse": {"x_TH", "ids", "weights", "tag", "out", "add"},
    "one row for all": {"out"},
    "overlaps itself": {"out"},
    "wants a gradient": {"out"},
    "has a gradient": {"out"},
    "for inference": {"out"},
}


@pytest.mark.parametrize("kind", PECULIAR)
def test_a_tensor_of_the_right_shape_and_a_peculiar_form_is_taken_or_refused(kind):
    """Sparse rows, and an `out` whose elements share memory, were errors of torch's, some after the rows had moved."""
    change = PECULIAR[kind]
    ids, weights = ROUTES.topk_ids_TK, ROUTES.topk_weights_TK
    calls = {
        "x_TH": {"x_TH": change(X_TH)},
        "ids": {"routes": ty.Routes(topk_ids_TK=change(ids), topk_weights_TK=weights)},
        "weights": {"routes": ty.Routes(topk_ids_TK=ids, topk_weights_TK=change(weights))},
        "tag": {"payloads": {"tag": change(TAG)}},
        "out": {"out": change(X_TH.clone())},
        "add": {"add": change(X_TH.clone())},
    }
    for argument, changed in calls.items():
        call = {"x_TH": X_TH, "routes": ROUTES, "payloads": {"tag": TAG}, **changed}
        outcome = on_ranks(1, serve, "two_sided", call)[0][0]
        expected = InputError if argument in REFUSED.get(kind, ()) else torch.Tensor
        if kind.endswith("a gradient") and argument in ("x_TH", "weights", "add"):
            expected = HandleError  # a layer in training mode
        assert isinstance(outcome, expected), (argument, outcome)


def test_the_stride_of_a_single_row_is_no_matter():
    def body(group):
        layer = spec()
        plan = ty.plan([layer], group)
        x_TH, routes = batch(layer, 1)
        out = torch.empty(layer.hidden_size, dtype=layer.dtype).as_strided((1, layer.hidden_size), (0, 1))
        built = build(plan, "moe")
        return torch.equal(built(x_TH, routes, out=out), built(x_TH, routes))

    assert on_ranks(1, body) == [True]


def add_a_residual(group):
    layer = spec()
    x_TH, routes = batch(layer, 4)
    shared = torch.nn.Linear(layer.hidden_size, layer.hidden_size, dtype=layer.dtype)
    plan = ty.plan([layer], group)
    built = build(plan, "moe", shared=shared)
    wants_gradient = built.eval()(x_TH, routes, add=x_TH.clone().requires_grad_())
    with torch.no_grad():
        return torch.equal(wants_gradient, build(plan, "moe", shared=shared)(x_TH, routes, add=x_TH))


def test_a_residual_or_shared_experts_that_want_a_gradient():
    """Ordinary modules have parameters that want one; the sum, which is made in place, was refused by torch."""
    assert on_ranks(1, add_a_residual) == [True]


@pytest.mark.parametrize(
    "payloads", [torch.ones(2), 3, "tag", {3: TAG, "tag": TAG}, {"tag": None}], ids=shown
)
def test_payloads_that_are_no_mapping_of_names_to_tensors(payloads):
    def call(group):
        built = build(ty.plan([LAYER], group), "moe")
        return ours(built, X_TH, ROUTES, payloads=payloads)

    assert isinstance(on_ranks(1, call)[0], InputError)


@pytest.mark.parametrize("scaled_by", [None, "1", float("nan"), 10**400, torch.ones(2)], ids=shown)
def test_routes_scaled_by_what_is_no_number(scaled_by):
    routes = ty.Routes(
        topk_ids_TK=ROUTES.topk_ids_TK, topk_weights_TK=ROUTES.topk_weights_TK, scaled_by=scaled_by
    )
    assert isinstance(ours(routes.check, 5), InputError)


# -- Files ---------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, **tensors: dict) -> Path:
    text = json.dumps({**HEADER, **tensors}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + BODY)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    "shape",
    [[2**62] * 20, [2**31, 2**31, 2**31, 0], [1] * 65, [2] * 100_000],
    ids=[
        "bytes beyond floats",
        "an empty tensor with sizes that overflow",
        "65 dimensions",
        "100,000 dimensions",
    ],
)
def test_a_shape_that_no_tensor_has(tmp_path, shape):
    wrong = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    error = ours(open_checkpoint, checkpoint(tmp_path, b=wrong))
    assert isinstance(error, CheckpointError)
    assert error.tensor == "b"


def test_a_file_without_end_or_beginning_is_not_read(tmp_path):
    """An index that is /dev/zero was read until the memory was full, and weights that are a pipe never came."""
    assert isinstance(ours(layers_from_config, "/dev/zero"), InputError)
    index = checkpoint(tmp_path) / "model.safetensors.index.json"
    index.symlink_to("/dev/zero")
    assert isinstance(ours(open_checkpoint, tmp_path), CheckpointError)
    index.unlink()
    os.mkfifo(tmp_path / "more.safetensors")
    error = ours(open_checkpoint, tmp_path)
    assert isinstance(error, CheckpointError)
    assert "more.safetensors is no file" in str(error)


def test_a_path_too_long_for_the_system(tmp_path):
    assert isinstance(ours(open_checkpoint, tmp_path / ("x" * 3000)), CheckpointError)
    index = json.dumps({"weight_map": {"a": "x" * 3000 + ".safetensors"}})
    (checkpoint(tmp_path) / "model.safetensors.index.json").write_text(index)
    assert isinstance(ours(open_checkpoint, tmp_path), CheckpointError)
