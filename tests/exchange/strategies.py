"""Cases for hypothesis: every combination that the declarations allow, with a cap on the work of one case."""

from hypothesis import strategies as st

from tokenyard.conformance.cases import Case
from tokenyard.exchange import EXCHANGES, resolve
from tokenyard.experts import ACTIVATIONS
from tokenyard.formats import FORMATS

# Multiply-adds that the reference experts may do in one case, on all ranks together.
_MOST_PRODUCTS = 3_000_000


@st.composite
def cases(draw, large, max_world=8, exchanges=tuple(EXCHANGES)):
    """A case; a *large* one has W ≥ 4, H ≥ 2048 and not the same number of tokens on each rank."""
    world = draw(st.integers(4, max_world) if large else st.integers(1, max_world))
    hidden_size = draw(
        st.sampled_from([2048, 2880, 4096, 7168])
        if large
        else st.sampled_from([1, 2, 16, 33, 100, 128, 256, 500])
    )
    intermediate_size = draw(st.sampled_from([1, 2, 4] if large else [1, 7, 16, 24]))
    num_experts = draw(st.sampled_from([1, 2, 3, 7, 8, 13, 16, 31]))
    top_k = draw(st.sampled_from([1, 2, 3, 4, 8] if large else [1, 2, 3, 5, 8, 17, 32]))
    per_token = top_k * hidden_size * intermediate_size * 3
    most = max(1, min(40, _MOST_PRODUCTS // (per_token * world)))
    tokens = draw(st.lists(st.integers(0, most), min_size=world, max_size=world))
    if large and len(set(tokens)) == 1:
        tokens[-1] += 1
    dtype = draw(st.sampled_from(["bfloat16", "bfloat16", "float16", "float32"]))
    wires = [None, *(n for n, f in FORMATS.items() if f().carries(_torch(dtype)) is None)]
    ways_back = [None, *(n for n, f in FORMATS.items() if f().returns(_torch(dtype)) is None)]
    wire = draw(st.sampled_from([*wires, "mxfp8(alignment=256)", "nvfp4(global_scale=8.0)"]))
    plain_wire = wire in (None, "bf16", "fp16", "fp32")
    exchange = draw(st.sampled_from(exchanges))
    sums = ["ranks", "ranks", "choices"] if resolve(exchange).returns_choices else ["ranks"]
    return Case(
        tokens=tuple(tokens),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        exchange=exchange,
        wire=wire,
        combine_wire=draw(st.sampled_from([None, None, *ways_back])),
        expert_rows=draw(st.sampled_from([None, None, "mxfp8", "nvfp4"])) if plain_wire else None,
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        bias=draw(st.booleans()),
        weights=draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        weight_on=draw(st.sampled_from(["output", "output", "input"])),
        placement=draw(st.sampled_from(["contiguous", "round_robin", "replicas"])),
        routes=draw(
            st.sampled_from(["uniform", "uniform", "gaps", "duplicates", "one_rank", "one_expert", "nobody"])
        ),
        dtype=dtype,
        id_dtype=draw(st.sampled_from(["int32", "int64"])),
        weight_dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        payloads=draw(st.booleans()),
        sum=draw(st.sampled_from(sums)),
        seed=draw(st.integers(0, 2**16)),
    )


def _torch(dtype):
    import torch

    return getattr(torch, dtype)


def is_large(case):
    """Whether a case counts towards the quarter that must not be small."""
    return case.world >= 4 and case.hidden_size >= 2048 and len(set(case.tokens)) > 1
