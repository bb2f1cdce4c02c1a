"""Quantized layouts, written by the libraries that checkpoints come from: the same numbers, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.checkpoints import references
from tests.checkpoints.small import Small, Written, same_bits, save
from tokenyard import launch
from tokenyard.checkpoints import declared_layout, open_checkpoint
from tokenyard.checkpoints.compressed_tensors import (
    CompressedInt4,
    CompressedMxfp4,
    CompressedMxfp8,
    CompressedNvfp4,
)
from tokenyard.checkpoints.layout import PLAIN_LAYOUTS
from tokenyard.checkpoints.reading import PackedMatrix
from tokenyard.checkpoints.vendor_layouts import DeepSeekFp8, ModelOptNvfp4
from tokenyard.experts import ExpertsSpec, ExpertWeights, activation, get
from tokenyard.formats import QuantizedMatrix, weight_format
from tokenyard.integrations.huggingface import layers_from_config
from tokenyard.routing import Placement

COMPRESSED = list(references.FORMATS)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}


def opened(folder, model: Small, write, quantization, **changes):
    config = {**model.config(), "quantization_config": quantization}
    return open_checkpoint(save(folder, model.tensors(write) | changes, config, files=2))


def parts(matrix: QuantizedMatrix, expert: int) -> tuple[Tensor, Tensor]:
    """Gate and up of an expert, decoded."""
    gate, up = matrix[expert].decode().chunk(2)
    return gate, up


def assert_reads(checkpoint, model: Small, write, read) -> None:
    """Every expert decodes to what the reference reads of the same tensors."""
    for layer in range(model.num_layers):
        weights = checkpoint.experts(layer, [6, 1])
        for place, expert in enumerate([6, 1]):
            found = (*parts(weights.w13, place), weights.w2[place].decode())
            for projection, ours in enumerate(found):
                expected = read(write(model.linear(layer, expert, projection)))
                assert same_bits(ours.to(expected.dtype), expected)


@pytest.mark.parametrize("weights", COMPRESSED)
def test_compressed_tensors(tmp_path, weights):
    blocks = weights == "fp8_block128"
    model = Small(hidden_size=256 if blocks else 96, intermediate_size=128 if blocks else 64)

    def write(w: Tensor) -> Written:
        return references.compress(weights, w)

    quantization = references.compressed_config(weights)
    checkpoint = opened(tmp_path, model, write, quantization)
    assert {layer.weights for layer in checkpoint.layers} == {weights}
    assert str(checkpoint.layers[0].layout) == f"compressed-tensors {weights}"
    # The scheme of fp8 quantizes activations, too; those of the others are weights alone.
    assert checkpoint.layers[0].inner == ("fp8_block128" if weights == "fp8_block128" else "exact")
    assert_reads(checkpoint, model, write, lambda written: references.decompress(weights, written))


def test_gate_and_up_keep_their_own_global_scale(tmp_path):
    model = Small()
    checkpoint = opened(
        tmp_path, model, lambda w: references.compress("nvfp4", w), references.compressed_config("nvfp4")
    )
    g = checkpoint.experts(0).w13.payloads["global_scale"]
    assert (g[:, 0] != g[:, 1]).all()
    for projection in (0, 1):
        amax = torch.stack([model.linear(0, e, projection).float().abs().amax() for e in range(8)])
        assert same_bits(g[:, projection].contiguous(), torch.tensor(2688.0) / amax)


@pytest.mark.parametrize("beside", [False, True])
def test_modelopt(tmp_path, beside):
    """Said in the config, or in the file beside it that ModelOpt writes."""
    model = Small(hidden_size=80, intermediate_size=48)
    config = model.config() | ({} if beside else {"quantization_config": MODELOPT})
    save(tmp_path, model.tensors(references.modelopt), config)
    if beside:
        (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    checkpoint = open_checkpoint(tmp_path)
    assert str(checkpoint.layers[0].layout) == "ModelOpt nvfp4"
    assert_reads(checkpoint, model, references.modelopt, references.modelopt_read)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [128, 256])
def test_deepseek(tmp_path, scale_dtype, width):
    model = Small(num_experts=7, hidden_size=200, intermediate_size=width)

    def write(w: Tensor) -> Written:
        return references.deepseek(w, scale_dtype)

    checkpoint = opened(tmp_path, model, write, DEEPSEEK)
    assert checkpoint.layers[0].weights == "fp8_block128"
    assert_reads(checkpoint, model, write, references.deepseek_read)


def gpt_oss(model: Small) -> dict[str, Tensor]:
    """gpt-oss as it lies on disk: gate and up rows take turns, and codes stand in blocks of 16 bytes."""
    tensors = model.shared()
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up = model.w13(layer).chunk(2, dim=1)
        for name, w in (
            ("gate_up_proj", torch.stack((gate, up), dim=2).flatten(1, 2)),
            ("down_proj", model.w2(layer)),
        ):
            held = weight_format("mxfp4").quantize(w).payloads
            tensors[f"{prefix}.{name}_blocks"] = held["data"].unflatten(-1, (-1, 16)).contiguous()
            tensors[f"{prefix}.{name}_scales"] = held["scales"]
            tensors[f"{prefix}.{name}_bias"] = w[..., 0].contiguous()
    return tensors


def gpt_oss_checkpoint(folder, model: Small):
    config = model.config() | {"quantization_config": {"quant_method": "mxfp4"}}
    return open_checkpoint(save(folder, gpt_oss(model), config))


RECIPES = {
    "nothing is said": ({}, "exact"),
    "static activations": ({"activation_scheme": "static"}, "exact"),
    "dynamic activations": ({"activation_scheme": "dynamic"}, "fp8_block128"),
    "scales that are powers of two": (
        {"activation_scheme": "dynamic", "scale_fmt": "ue8m0"},
        "fp8_block128(power_of_two_scales=True)",
    ),
}


@pytest.mark.parametrize(("told", "inner"), RECIPES.values(), ids=RECIPES)
def test_the_recipe_says_how_numbers_are_held_between_the_products(tmp_path, told, inner):
    quantization = {**DEEPSEEK, **told}
    checkpoint = opened(tmp_path, Small(hidden_size=256), references.deepseek, quantization)
    assert {layer.inner for layer in checkpoint.layers} == {inner}
    config = {**checkpoint.config, "num_experts_per_tok": 2}
    for weights, expected in (("fp8_block128", inner), (None, "exact")):
        specs = layers_from_config(config, weights=weights)
        assert {spec.inner for spec in specs} == {expected}
    assert {spec.inner for spec in layers_from_config(config, weights="fp8_block128", inner="exact")} == {
        "exact"
    }


def test_gpt_oss(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = Small(model_type="gpt_oss", hidden_size=96, intermediate_size=64)
    checkpoint = gpt_oss_checkpoint(tmp_path, model)
    layer = checkpoint.layers[1]
    assert (layer.weights, layer.interleaved, layer.bias, layer.gated) == ("mxfp4", True, True, True)
    weights, tensors = checkpoint.experts(1, [2, 5]), gpt_oss(model)
    for matrix, name in ((weights.w13, "gate_up_proj"), (weights.w2, "down_proj")):
        prefix = f"model.layers.1.mlp.experts.{name}"
        theirs = convert_moe_packed_tensors(tensors[f"{prefix}_blocks"], tensors[f"{prefix}_scales"])
        assert same_bits(matrix.decode(torch.bfloat16), theirs.mT[[2, 5]].contiguous())
    assert same_bits(weights.b13, tensors["model.layers.1.mlp.experts.gate_up_proj_bias"][[2, 5]])
    assert same_bits(weights.b2, tensors["model.layers.1.mlp.experts.down_proj_bias"][[2, 5]])


WRITERS = {
    **{f"compressed {name}": (name, references.compressed_config) for name in COMPRESSED},
    "modelopt": (references.modelopt, MODELOPT),
    "deepseek": (references.deepseek, DEEPSEEK),
    "gpt_oss": (None, None),
}


def any_checkpoint(folder, kind: str):
    model = Small(hidden_size=128, intermediate_size=128)
    write, quantization = WRITERS[kind]
    if kind == "gpt_oss":
        return gpt_oss_checkpoint(folder, Small(model_type="gpt_oss"))
    if isinstance(write, str):
        name = write
        return opened(folder, model, lambda w: references.compress(name, w), quantization(name))
    return opened(folder, model, write, quantization)


@pytest.mark.parametrize("kind", WRITERS)
def test_each_of_four_ranks_reads_its_quarter_and_nothing_is_decoded(tmp_path, kind):
    """And it arrives as it lies in the files: the same bytes, but for the few of the global scales."""
    any_checkpoint(tmp_path, kind)
    placement = Placement.contiguous(8, 4)

    def rank(group):
        checkpoint = open_checkpoint(tmp_path)
        held = 0
        for layer in checkpoint.layers:
            weights = checkpoint.experts(layer.name, placement.local_experts(group.rank))
            held += weights.nbytes
        return checkpoint.bytes_read, checkpoint.experts_nbytes, held

    for read, everything, held in launch(4, rank, ranks="threads"):
        assert 4 * read == everything
        assert abs(held - read) <= 2 * 2 * 2 * 16  # layers, experts, matrices, bytes of global scales


@pytest.mark.parametrize("kind", WRITERS)
def test_what_was_read_can_be_computed_with(tmp_path, kind):
    """The weights fit the experts of their format, as the layer describes itself."""
    layer = any_checkpoint(tmp_path, kind).layers[0]
    weights = open_checkpoint(tmp_path).experts(layer.name, [0, 3])
    name = "swiglu_clamped" if layer.interleaved else "swiglu"
    spec = ExpertsSpec(
        hidden_size=layer.hidden_size, intermediate_size=layer.intermediate_size, num_local_experts=2, top_k=2,
        activation=activation(name), bias=layer.bias, weights=layer.weights,
    )  # fmt: skip
    experts = get("grouped")(spec, weights)
    assert same_bits(experts.weights.w13.decode(), weights.w13.decode())


def test_layers_of_one_model_may_differ(tmp_path):
    """A 4-bit body with a bf16 head: what is plain is read as plain."""
    model = Small()
    body = model.tensors(lambda w: references.compress("mxfp4", w))
    plain = {name: t for name, t in model.tensors().items() if "layers.1.mlp.experts" in name}
    tensors = {name: t for name, t in body.items() if "layers.1.mlp.experts" not in name} | plain
    config = model.config() | {"quantization_config": references.compressed_config("mxfp4")}
    checkpoint = open_checkpoint(save(tmp_path, tensors, config))
    assert [layer.weights for layer in checkpoint.layers] == ["mxfp4", "bf16"]
    assert same_bits(checkpoint.experts(1).w2, model.w2(1))


def test_mixed_precision_is_told_by_the_tensors(tmp_path):
    model = Small()
    first = model.tensors(lambda w: references.compress("mxfp4", w))
    second = model.tensors(lambda w: references.compress("nvfp4", w))
    tensors = {name: t for name, t in first.items() if "layers.1.mlp.experts" not in name}
    tensors |= {name: t for name, t in second.items() if "layers.1.mlp.experts" in name}
    groups = {}
    for name in ("mxfp4", "nvfp4"):
        (group,) = references.compressed_config(name)["config_groups"].values()
        groups[name] = {**group, "format": references.FORMATS[name]}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
    }
    checkpoint = open_checkpoint(
        save(tmp_path, tensors, model.config() | {"quantization_config": quantization})
    )
    assert [layer.weights for layer in checkpoint.layers] == ["mxfp4", "nvfp4"]


@pytest.mark.parametrize(
    ("shape", "dtype", "fits"),
    [
        ((64, 1), torch.uint8, True),
        ((64,), torch.uint8, True),
        ((64, 1), torch.int8, False),
        ((64, 2), torch.uint8, False),
        ((32, 2), torch.uint8, False),
        ((65,), torch.uint8, False),
    ],
    ids=str,
)
def test_a_tensor_is_one_projections_of_one_expert_if_its_dtype_size_and_rows_are(shape, dtype, fits):
    packed = PackedMatrix(declared_layout({"quant_method": "mxfp4"}), (8, 64, 32), parts=1)
    expected = None if fits else "U8 or F8_E8M0[64, 1]"
    assert packed.mismatch("scales", torch.zeros(shape, dtype=dtype)) == expected


@pytest.mark.parametrize("layout", [CompressedNvfp4, CompressedMxfp4, CompressedMxfp8, CompressedInt4])
def test_weights_that_are_declared_otherwise_than_they_can_be_held_are_told(layout):
    made = layout()
    for key, value in made.arguments.items():
        other = {**made.arguments, key: "another"}
        declared = {"config_groups": {"group_0": {"weights": other}}}
        assert made.mismatch(declared) == f"{key} 'another' where {value!r} can be held"
    assert made.arguments["symmetric"] is True
    same = {"config_groups": {"group_0": {"weights": made.arguments}}}
    assert made.mismatch(same) is None


@pytest.mark.parametrize(
    ("method", "algorithm", "declared"),
    [
        ("modelopt", "NVFP4", True),
        ("modelopt", "NVFP4_AWQ", True),
        ("modelopt_fp4", "FP4", True),
        ("modelopt", "MIXED_PRECISION", True),
        ("modelopt", "FP8", False),
        ("modelopt", None, False),
        ("another", "NVFP4", False),
        (None, "FP4", False),
    ],
)
def test_what_modelopt_says_of_its_nvfp4(method, algorithm, declared):
    told = {"quant_method": method, "quant_algo": algorithm}
    told = {key: value for key, value in told.items() if value is not None}
    words = ", ".join(f"{key} {value!r}" for key, value in told.items())
    assert str(declared_layout(told)) == ("ModelOpt nvfp4" if declared else words)


@pytest.mark.parametrize("layout", [ModelOptNvfp4(), *PLAIN_LAYOUTS], ids=repr)
def test_a_layout_that_is_only_read_has_no_config_to_write(layout):
    with pytest.raises(NotImplementedError, match=f"{layout} is not written"):
        layout.quantization_config([])


@pytest.mark.parametrize("parts", [1, 2])
def test_experts_that_share_a_block_of_scales_are_quantized_one_by_one(parts):
    """Gate and up share blocks where their outputs are no multiple of 128; experts never do."""
    draw = torch.Generator().manual_seed(1)
    plain = ExpertWeights(
        w13=torch.randn(3, 2 * 96, 200, generator=draw) * torch.tensor([1.0, 9.0, 80.0]).view(3, 1, 1),
        w2=torch.randn(3, 200, 96, generator=draw),
    )
    together = DeepSeekFp8().quantize(plain, parts)
    for expert in range(3):
        alone = DeepSeekFp8().quantize(plain.select([expert]), parts)
        for name, payload in together.w13.payloads.items():
            assert torch.equal(payload[expert].float(), alone.w13.payloads[name][0].float())
    if parts == 2:  # one scale for all outputs, and for each block of inputs its own
        largest = [plain.w13[:, :, some].abs().amax((1, 2)) for some in (slice(0, 128), slice(128, 200))]
        due = torch.stack(largest, dim=1).unsqueeze(1).expand(3, 2, 2) / 448
        assert torch.allclose(together.w13.payloads["scales"], due)
