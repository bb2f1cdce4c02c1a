"""Everything that takes something from outside, given garbage: it works, or an error of ours comes out.

Each target is a hypothesis test. `test_targets.py` runs it on a few examples; `atheris_targets.py` drives the same test
with bytes that atheris changes until they reach lines which no bytes have reached before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

import tokenyard as ty
from tests.cli.runner import MIXTRAL, call
from tests.fuzz.garbage import JSON, NUMBERS, TEXTS, anything, changed, mostly, ours, peculiar, plain, tensors
from tests.models import batch, build
from tokenyard.checkpoints import Checkpoint, open_checkpoint
from tokenyard.errors import PeerFailed
from tokenyard.exchange import EXCHANGES
from tokenyard.exchange.announcement import Announcement
from tokenyard.formats import FORMATS, Payload
from tokenyard.group.base import Group
from tokenyard.integrations.huggingface import FAMILIES, layers_from_config
from tokenyard.planning import Draft
from tokenyard.routing import GroupedSigmoidRouter, Placement, SoftmaxRouter, TopLogitsRouter

FIELDS = [field.name for field in dataclasses.fields(ty.LayerSpec)]
SPEC = {
    "name": "moe",
    "hidden_size": 32,
    "intermediate_size": 8,
    "num_experts": 5,
    "top_k": 2,
    "max_tokens": 6,
}


def use(drafted: Draft) -> None:
    """What a plan does with a draft before the first token."""
    assert str(drafted)
    json.dumps(drafted.fields())
    assert drafted.workspace_bytes < 2**48
    assert 0 <= drafted.fingerprint() < 2**63


def fields_of(kinds: st.SearchStrategy) -> st.SearchStrategy:
    """Some fields of a layer, each with anything."""
    return st.dictionaries(st.sampled_from(FIELDS), kinds, min_size=1, max_size=3)


@given(changes=fields_of(anything()))
def layer_specs(changes):
    """`LayerSpec`, any value of any type in any field."""
    drafted = ours(lambda: ty.draft([ty.LayerSpec(**{**SPEC, **changes})], 2))
    if isinstance(drafted, Draft):
        use(drafted)


ROW_FORMATS = st.sampled_from([None, *FORMATS, "mxfp8(alignment=64)"])
SIZES = mostly(st.integers(1, 70), st.sampled_from([4096, 65536, 2**31 - 1, 10**9, 10**12, 10**15]))


@st.composite
def placements(draw):
    """Placements by name, or made of any table."""
    table = st.lists(st.lists(st.integers(-1, 5), max_size=4), max_size=4)
    make = draw(st.sampled_from(["name"] * 6 + ["explicit", "replicated", "anything"]))
    if make == "name":
        return draw(mostly(st.sampled_from(["contiguous", "round_robin"]), TEXTS))
    if make == "explicit":
        return ours(Placement.explicit, draw(SIZES), draw(mostly(table, anything())))
    if make == "replicated":
        base = ours(Placement.contiguous, draw(st.integers(1, 5)), draw(st.integers(1, 3)))
        replicas = st.dictionaries(st.integers(-1, 5), st.lists(st.integers(-1, 3), max_size=3), max_size=3)
        return ours(Placement.replicated, base, draw(mostly(replicas, anything())))
    return ours(Placement.contiguous, draw(anything()), draw(anything()))


@st.composite
def routers(draw):
    """Routers of any kind, with any settings."""
    if draw(st.booleans()):
        return None
    kind = draw(st.sampled_from([SoftmaxRouter, GroupedSigmoidRouter, TopLogitsRouter]))
    settings = {"top_k": draw(mostly(st.integers(1, 5), anything()))}
    settings["renormalize"] = draw(mostly(st.booleans(), anything()))
    settings["routed_scaling"] = draw(mostly(st.just(1.0), st.floats(), anything()))
    if kind is GroupedSigmoidRouter:
        settings["num_groups"] = draw(mostly(st.just(1), st.integers(1, 5), anything()))
        settings["choice_bias_E"] = draw(st.one_of(st.none(), st.just(torch.zeros(5)), tensors()))
    return ours(kind, **settings)


@st.composite
def layers(draw):
    """A layer that might well be planned."""
    return ty.LayerSpec(
        name=draw(st.sampled_from(["a", "b", "c"])),
        hidden_size=draw(SIZES),
        intermediate_size=draw(SIZES),
        num_experts=draw(mostly(st.integers(4, 9), SIZES)),
        top_k=draw(mostly(st.integers(1, 4), SIZES)),
        max_tokens=draw(st.one_of(st.none(), SIZES)),
        dtype=draw(mostly(st.just(torch.bfloat16), st.just(torch.float32))),
        wire=draw(mostly(st.sampled_from([None, "mxfp8", "fp8_block128"]), ROW_FORMATS)),
        combine_wire=draw(mostly(st.none(), ROW_FORMATS)),
        expert_rows=draw(mostly(st.none(), ROW_FORMATS)),
        experts=draw(mostly(st.sampled_from(["grouped", "reference"]), st.just("self_routing"), TEXTS)),
        weights=draw(mostly(st.just("bf16"), st.sampled_from(["fp32", "mxfp4"]), TEXTS)),
        placement=draw(placements()),
        router=draw(routers()),
    )


@given(
    specs=mostly(
        st.lists(layers(), min_size=1, max_size=2, unique_by=lambda spec: spec.name),
        st.lists(layers(), max_size=3),
    ),
    world=mostly(st.integers(1, 4), SIZES, anything()),
    exchange=mostly(st.sampled_from([*EXCHANGES]), TEXTS, anything()),
    max_tokens=mostly(SIZES, anything()),
    in_flight=mostly(st.integers(1, 3), NUMBERS),
)
def drafts(specs, world, exchange, max_tokens, in_flight):
    """Plans of random layers, on any number of ranks, for any number of tokens."""
    made = ours(ty.draft, specs, world, exchange=exchange, max_tokens=max_tokens, in_flight=in_flight)
    if isinstance(made, Draft):
        use(made)


@st.composite
def some_routes(draw):
    """Routes of anything, most of it tensors."""
    good = st.just(batch(ty.LayerSpec(**SPEC), 4)[1])
    some_ids = st.integers(-2, 6).map(lambda number: torch.full((4, 2), number))
    good_ids = st.one_of(good.map(lambda routes: routes.topk_ids_TK), some_ids)
    ids = mostly(good_ids, tensors(columns=3), anything())
    weights = mostly(good.map(lambda routes: routes.topk_weights_TK), tensors(columns=3), anything())
    scaled = mostly(st.just(1.0), anything())
    return ty.Routes(topk_ids_TK=draw(ids), topk_weights_TK=draw(weights), scaled_by=draw(scaled))


@given(
    routes=some_routes(),
    num_experts=st.sampled_from([1, 5, 5, 10**9]),
    top_k=mostly(st.sampled_from([None, 2]), st.integers(0, 3)),
    num_tokens=mostly(st.sampled_from([None, 4]), st.integers(0, 6)),
    values=st.booleans(),
)
def routes(routes, num_experts, top_k, num_tokens, values):
    """`Routes`: any tensors as ids and weights."""
    ours(routes.check, num_experts, top_k=top_k, num_tokens=num_tokens, values=values)


@st.composite
def peculiar_routes(draw):
    """Good routes, in tensors of a peculiar form."""
    ids, weights = draw(peculiar(ROUTES.topk_ids_TK)), draw(peculiar(ROUTES.topk_weights_TK))
    only = draw(st.sampled_from(["ids", "weights", "both"]))
    return ty.Routes(
        topk_ids_TK=ROUTES.topk_ids_TK if only == "weights" else ids,
        topk_weights_TK=ROUTES.topk_weights_TK if only == "ids" else weights,
    )


LAYER = ty.LayerSpec(**SPEC, payloads=(Payload(name="tag", dtype=torch.int64, width=2),))
X_TH, ROUTES = batch(LAYER, 4)
TAG = torch.arange(8).view(4, 2)


@st.composite
def calls(draw):
    """The arguments of one call of a layer, of which any may be anything."""
    any_rows = tensors(columns=32, dtypes=st.just(torch.bfloat16))
    kinds = {
        "x_TH": st.one_of(peculiar(X_TH), any_rows, tensors(), anything()),
        "routes": st.one_of(peculiar_routes(), some_routes(), anything()),
        "payloads": st.one_of(st.one_of(peculiar(TAG), anything()).map(lambda tag: {"tag": tag}), anything()),
        "out": st.one_of(peculiar(X_TH.clone()), tensors(rows=4, columns=32), anything()),
        "add": st.one_of(peculiar(X_TH.clone()), tensors(rows=4, columns=32), anything()),
    }
    good = {"x_TH": X_TH, "routes": ROUTES, "payloads": {"tag": TAG}}
    wrong = draw(st.sets(st.sampled_from([*kinds]), min_size=1, max_size=2))
    return {**good, **{name: draw(kinds[name]) for name in sorted(wrong)}}


def serve(group: Group, exchange: str, bad) -> tuple[object, torch.Tensor]:
    """One rank: a call in which rank 0 passes garbage, and one in which nobody does."""
    built = build(ty.plan([LAYER], group, exchange=exchange), "moe")
    good = {"x_TH": X_TH, "routes": ROUTES, "payloads": {"tag": TAG}}
    asked = dict(bad if group.rank == 0 else good)
    outcome = ours(built, asked.pop("x_TH"), asked.pop("routes"), **asked)
    return outcome, built(X_TH, ROUTES, payloads={"tag": TAG})


@given(bad=calls(), exchange=st.sampled_from([*EXCHANGES]))
def layer_calls(bad, exchange):
    """Calls of a layer: garbage on one rank is its own error, reaches the other, and the next call is as ever."""
    outcomes, after = zip(*ty.launch(2, serve, exchange, bad, deadline=20.0), strict=True)
    assert isinstance(outcomes[0], (torch.Tensor, ty.TokenyardError))
    failed = isinstance(outcomes[0], ty.TokenyardError)
    assert isinstance(outcomes[1], PeerFailed if failed else torch.Tensor), outcomes
    assert torch.equal(after[0], after[1]), "both brought the same tokens"
    assert after[0].isfinite().all()


CONFIGS = {
    name: {
        "model_type": name,
        "num_hidden_layers": 4,
        "num_experts_per_tok": 2,
        **dict.fromkeys(("hidden_size", family.intermediate_size, *family.num_experts), 64),
        **family.defaults,
    }
    for name, family in FAMILIES.items()
}


@given(data=st.data())
def huggingface_configs(data):
    """Configs of models: any JSON, and those of every family with anything in any key."""
    some = st.sampled_from([*CONFIGS.values()])
    slightly = some.flatmap(lambda config: changed(config, times=1))
    config = data.draw(mostly(slightly, some.flatmap(changed), JSON, plain()))
    if isinstance(config, dict) and data.draw(st.booleans()):
        key = data.draw(st.sampled_from([*CONFIGS["deepseek_v3"], "text_config", "mlp_only_layers", "dtype"]))
        config = {**config, key: data.draw(st.one_of(JSON, anything()))}
    found = ours(layers_from_config, config)
    if isinstance(found, list):
        assert 0 < len(found) <= 8192
        ours(ty.draft, found[:2], 2, max_tokens=4)


EXPERTS = {"a.experts.gate_up_proj": torch.ones(2, 4, 2), "a.experts.down_proj": torch.ones(2, 2, 2)}
FILE = save(EXPERTS)
HEADER = json.loads(FILE[8 : 8 + int.from_bytes(FILE[:8], "little")])
BODY = FILE[8 + int.from_bytes(FILE[:8], "little") :]


def read_all(folder: Path, config: object) -> None:
    """Open a checkpoint and read all of it."""
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = ours(open_checkpoint, folder)
    if isinstance(checkpoint, Checkpoint):
        on_disk = sum(file.stat().st_size for file in folder.iterdir())
        assert checkpoint.nbytes <= on_disk
        for layer in checkpoint.layers:
            ours(checkpoint.experts, layer.name)
        for name in checkpoint.tensors:
            ours(checkpoint.tensor, name)


@given(data=st.data())
def checkpoint_headers(data):
    """Headers of safetensors files: other dtypes, shapes and places, names that stand twice, nesting, any bytes."""
    header = data.draw(mostly(changed(HEADER, times=1), changed(HEADER), JSON))
    if isinstance(header, dict) and data.draw(st.booleans()):
        lengths = st.sampled_from([0, 1, 2, 4, 2**31, 2**62, 2**63 - 1])
        sizes = st.one_of(st.lists(lengths, max_size=8), lengths.map(lambda length: [length] * 40))
        entry = {"dtype": data.draw(st.sampled_from(["F32", "F4", "U8", "BF16", "F8_E4M3", "C64"]))}
        entry |= {
            "shape": data.draw(sizes),
            "data_offsets": data.draw(st.sampled_from([[0, 0], [0, 0], [96, 96], [0, 96]])),
        }
        names = ["b", "b", "b", "a.experts.down_proj", "a.experts.0.up_proj.weight"]
        header[data.draw(st.sampled_from(names))] = entry
    text = json.dumps(header).encode()
    others = [text + b" " * 7, text.replace(b"down", b"gate_up"), text[:-1]]
    text = data.draw(mostly(st.just(text), st.sampled_from(others)))
    length = data.draw(mostly(st.just(len(text)), st.sampled_from([0, 2**63, len(text) + 1])))
    body = data.draw(mostly(st.just(BODY), st.sampled_from([b"", BODY[:-1], BODY + b"\0"])))
    with tempfile.TemporaryDirectory() as name:
        Path(name, "model.safetensors").write_bytes(length.to_bytes(8, "little") + text + body)
        read_all(Path(name), data.draw(mostly(st.just({}), changed(CONFIGS["mixtral"]))))


@given(
    places=mostly(
        changed(dict.fromkeys(EXPERTS, "model.safetensors"), times=1),
        st.dictionaries(
            st.sampled_from([*EXPERTS, "x"]), st.one_of(TEXTS, st.just("model.safetensors"), JSON)
        ),
        JSON,
    ),
    config=mostly(st.just({}), JSON, changed(CONFIGS["qwen3_moe"])),
    raw=mostly(st.none(), st.binary(max_size=40)),
)
def checkpoint_indexes(places, config, raw):
    """Index files and configs beside weights: any names, any JSON, any bytes."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "model.safetensors").write_bytes(FILE)
        index = json.dumps({"weight_map": places}).encode() if raw is None else raw
        Path(name, "model.safetensors.index.json").write_bytes(index)
        read_all(Path(name), config)


WORD = st.integers(-(2**63), 2**63 - 1)


@given(
    place=st.tuples(
        WORD, WORD, st.one_of(st.integers(-1, 2), WORD), st.one_of(st.integers(0, 1), WORD), WORD, WORD
    ),
    lengths=st.tuples(*[st.one_of(st.integers(0, 5), st.integers(-1, 90), WORD)] * 2),
    rest=st.binary(max_size=90),
    cut=st.one_of(st.none(), st.integers(0, 63)),
)
def announcements(place, lengths, rest, cut):
    """What a rank says at the start of a phase: any numbers, any bytes."""
    encoded = b"".join(number.to_bytes(8, "little", signed=True) for number in (*place, *lengths)) + rest
    heard = ours(Announcement.decode, encoded[:cut], 1)
    if isinstance(heard, Announcement):
        assert 8 * len(heard.counts) <= len(encoded)
        assert heard.where(heard, ["moe"])


# Arguments of commands that do nothing but look, and options that any command has.
WORDS = st.one_of(
    st.sampled_from(
        [
            "plan",
            "inspect",
            "support",
            "--config",
            "--ranks",
            "--json",
            "--write",
            "--version",
            "--help",
            "--max-tokens",
        ]
    ),
    st.sampled_from(
        ["--wire", "mxfp8", "--exchange", "one_sided", "--in-flight", "--placement", "--experts", "4"]
    ),
    TEXTS.filter(lambda text: "\0" not in text),
    NUMBERS.filter(lambda number: abs(number) < 1e300).map(str),
)


@given(
    command=st.sampled_from(["plan", "inspect", "support", ""]),
    words=st.lists(WORDS, max_size=8),
    config=st.one_of(st.just(MIXTRAL), changed(MIXTRAL), JSON),
)
def command_lines(command, words, config):
    """`tokenyard`, with any arguments: an answer, a usage message, or an error of ours; never a traceback."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        Path("config.json").write_text(json.dumps(config))
        usual = ["--config", "config.json", "--ranks", "2"] if command == "plan" else []
        result = call(*([command] if command else []), *usual, *words)
    assert result.exit_code in (0, 2), result.output


TARGETS = {
    target.__name__: target
    for target in (
        layer_specs,
        drafts,
        routes,
        layer_calls,
        huggingface_configs,
        checkpoint_headers,
        checkpoint_indexes,
        announcements,
        command_lines,
    )
}
