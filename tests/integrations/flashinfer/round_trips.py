"""Round trips through `MoeAlltoAll`, compared with a plain twin.

All ranks' batches follow from a seed, so each rank can say what it must receive, and what must come home. On a GPU
unused slots are known by their ids alone: what else stands there is nobody's.
"""

import torch

from tokenyard.conformance.cases import same_bits
from tokenyard.integrations.flashinfer import MoeAlltoAll
from tokenyard.routing import Placement


def make(group, **changes):
    sizes = {"max_num_tokens": 8, "top_k": 2, "num_experts": 5}
    return MoeAlltoAll(**({"mapping": None} | sizes | changes), group=group)


def batch(rank, tokens, top_k, num_experts, seed=0, hidden=6):
    """Ids of one rank's tokens (with -1 and duplicates), and payloads of many dtypes."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    ids_TK = torch.randint(-1, num_experts, (tokens, top_k), generator=draw, dtype=torch.int32)
    if tokens > 1:
        ids_TK[0] = -1  # a token for nobody
        ids_TK[1] = int(torch.randint(0, num_experts, (), generator=draw))  # one expert, top_k times
    noise = torch.randint(0, 256, (tokens, 2 * hidden), generator=draw, dtype=torch.uint8)
    payloads = [
        noise.view(torch.bfloat16),  # any bits: NaN, Inf, -0
        noise[:, :3],  # not contiguous
        ids_TK,
        torch.rand(tokens, top_k, generator=draw),
        noise[:, :4].view(torch.float8_e4m3fn).reshape(tokens, 2, 2),
        torch.arange(tokens) + 100 * rank,  # no second dimension
        noise[:, :1] > 127,
    ]
    return ids_TK, payloads


def goes_to(ids_TK, rank, world, num_experts):
    mine = Placement.contiguous(num_experts, world).local_experts(rank)
    return [token for token, ids in enumerate(ids_TK.tolist()) if set(mine) & set(ids)]


def results_of(received):
    """What stand-ins for experts return: numbers that depend on the row, the slot's rank and nothing else."""
    tags = received[5].float()
    return torch.stack([tags * 1.25 + 0.1, tags - 7, tags / 3], dim=-1)


def round_trip(a2a, group, tokens, seed=0, most=None, in_workspace=False, dtype=torch.float32, output=None):
    """One dispatch and combine; the names of all that was not as the twin says."""
    world, top_k, num_experts = group.size, a2a.top_k, a2a.num_experts
    most = max(tokens) if most is None else most
    batches = [batch(rank, tokens[rank], top_k, num_experts, seed) for rank in range(world)]
    ids_TK, payloads = batches[group.rank]
    before, device = [payload.clone() for payload in payloads], group.device
    sent = [payload.to(device) for payload in payloads]
    received = a2a.dispatch(sent[2], sent, most, invalid_token_expert_id=-9, expert_id_payload_index=2)
    wrong = [] if all(same_bits(now.cpu(), old) for now, old in zip(sent, before, strict=True)) else ["input"]
    clears = a2a._exchange.carrier.reads_values
    received = [payload.cpu() for payload in received]
    results = results_of(received).to(dtype).to(device)  # a GPU divides otherwise
    for source, (ids, sent) in enumerate(batches):
        here = goes_to(ids, group.rank, world, num_experts)
        for number, (got, all_sent) in enumerate(zip(received, sent, strict=True)):
            if got.shape != (world, most, *all_sent.shape[1:]) or got.dtype != all_sent.dtype:
                wrong.append(f"shape of payload {number}")
            if not same_bits(got[source, : len(here)], all_sent[torch.tensor(here, dtype=torch.int64)]):
                wrong.append(f"payload {number} from rank {source}")
            unused = got[source, len(here) :].contiguous()
            if number == 2 and not bool((unused == -9).all()):
                wrong.append("ids of unused slots")
            if clears and number != 2 and unused.numel() and bool(unused.flatten().view(torch.uint8).any()):
                wrong.append(f"unused slots of payload {number}")
    if in_workspace:
        there = a2a.get_combine_payload_tensor_in_workspace(most, 3, dtype)
        there.view(-1, 3).copy_(results.view(-1, 3))
        results = there.view(-1, 3).view(world, most, 3)  # as engines hand it on
    y_TH = a2a.combine(results, most, payload_in_workspace=in_workspace, output=output)
    sums_TH = torch.zeros(tokens[group.rank], 3)
    tags_TH = results_of([None] * 5 + [payloads[5]]).to(dtype).float()
    for rank in range(world):
        here = goes_to(ids_TK, rank, world, num_experts)
        sums_TH[here] += tags_TH[here]
    if not same_bits(y_TH.cpu(), sums_TH.to(dtype)):
        wrong.append("combined rows")
    return wrong
