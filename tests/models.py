"""Small layers that tests run: specs, weights, batches. Everything follows from a seed."""

import torch

import tokenyard as ty
from tokenyard.conformance.cases import random_weights
from tokenyard.exchange import EXCHANGES
from tokenyard.group import thread_groups


def spec(name="moe", **changes):
    """A small layer."""
    fields = {"hidden_size": 32, "intermediate_size": 8, "num_experts": 5, "top_k": 2, "max_tokens": 16}
    return ty.LayerSpec(name=name, **(fields | changes))


def build(plan, name, seed=0, **arguments):
    """The layer `name` of a plan, with random weights."""
    weights = random_weights(plan.wiring(name).spec, seed)
    return ty.MoELayer(plan, name, weights.select(plan.local_experts(name)), **arguments)


def batch(spec, tokens, seed=0, scaled_by=1.0):
    """Rows and routes for `tokens` tokens."""
    draw = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(tokens, spec.hidden_size, generator=draw).to(spec.dtype)
    ids_TK = torch.randint(0, spec.num_experts, (tokens, spec.top_k), generator=draw)
    weights_TK = torch.rand(tokens, spec.top_k, generator=draw)
    return x_TH, ty.Routes(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK, scaled_by=scaled_by)


def on_ranks(world, fn, *args, ranks="threads", **options):
    """`launch`, with a deadline that lets a failing test end soon."""
    return ty.launch(world, fn, *args, ranks=ranks, deadline=options.pop("deadline", 20.0), **options)


def raised(fn, *args, **kwargs):
    """The tokenyard error that a call raises, so that a rank can bring it back; None if there is none."""
    try:
        fn(*args, **kwargs)
    except ty.TokenyardError as error:
        return error
    return None


# The exchanges that a paranoid plan can watch on CPUs.
WATCHED = [name for name, cls in EXCHANGES.items() if cls.watches(thread_groups(1)[0]) is None]
# Those through which rows can come home unreduced, for the caller to sum over ranks.
UNREDUCED = [name for name, cls in EXCHANGES.items() if not cls.sums_in_hosts]
