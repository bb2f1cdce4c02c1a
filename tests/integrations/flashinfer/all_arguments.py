"""Round trips of two ranks with all arguments of FlashInfer's, by the kernels that serve GPUs."""

import torch

from tests.integrations.flashinfer.round_trips import make
from tokenyard.formats import Mxfp8
from tokenyard.integrations.flashinfer import moe_a2a_active_rank_mask

IDS = torch.tensor([[0, 4], [3, -1]])  # the first token goes to both ranks, the second to rank 1


def results_of(rank):
    return (torch.arange(2 * 4 * 32).view(2, 4, 32) / 7 + rank).half()


def all_arguments(group):
    """Quantized and low-precision outputs, statistics, and a round trip of rank 0 alone."""
    a2a, device = make(group, eplb_stats_num_experts=3, enable_rank_mask=True), group.device
    both, first = moe_a2a_active_rank_mask([0, 1], 2), moe_a2a_active_rank_mask([0], 2)
    stats = torch.full((3,), 5 + group.rank, dtype=torch.int32, device=device)
    ids, rows, results = IDS.to(device), torch.ones(2, 4, device=device), results_of(group.rank).to(device)

    def trip(mask, **options):
        a2a.dispatch(ids, [rows, ids], 4, -9, 1, stats, mask)
        gathered, unused = a2a.eplb_gathered_stats.tolist(), a2a.unused_slots().tolist()
        y_TH = a2a.combine(results, 4, active_rank_mask=mask, **options)
        # As bytes where it is quantized: torch does not pickle e4m3.
        return gathered, unused, (y_TH.view(torch.uint8) if "output_dtype" in options else y_TH).cpu()

    scales = torch.zeros(2, dtype=torch.uint8, device=device)
    found = [
        trip(both),
        (*trip(both, output_dtype=torch.float8_e4m3fn, output_scales=scales), scales.cpu().clone()),
        trip(both, use_low_precision=True),
    ]
    if group.rank == 0:
        found.append(trip(first, output_dtype=torch.float8_e4m3fn, output_scales=scales))
    return found


def check_all_arguments(by_rank):
    """Compare what both ranks found with plain sums."""
    for rank, found in enumerate(by_rank):
        here = [results_of(owner)[rank].float() for owner in range(2)]
        sums_TH = torch.stack([here[0][0] + here[1][0], here[1][1]])
        low = [part.to(torch.float8_e4m3fn).float() for part in here]
        plain, quantized, in_low_precision = found[:3]
        for gathered, unused_WT, *_ in (plain, quantized, in_low_precision):
            assert gathered == [[5] * 3, [6] * 3]
            assert unused_WT == [[slot > rank for slot in range(4)]] * 2
        assert torch.equal(plain[2], sums_TH.half())
        encoded = Mxfp8().encode(sums_TH).payloads
        assert torch.equal(quantized[2], encoded["data"].view(torch.uint8))
        assert torch.equal(quantized[3], encoded["scales"].flatten())
        assert torch.equal(in_low_precision[2], torch.stack([low[0][0] + low[1][0], low[1][1]]).bfloat16())
    gathered, unused_WT, alone = by_rank[0][3]
    assert gathered == [[5] * 3, [0] * 3]
    assert unused_WT == [[False, True, True, True], [True] * 4]
    encoded = Mxfp8().encode(torch.stack([results_of(0)[0, 0].float(), torch.zeros(32)])).payloads
    assert torch.equal(alone, encoded["data"].view(torch.uint8))
