"""`tokenyard bench balance`: uneven load before and after a move, beside uniform load; a move beside a copy."""

import torch

from tests.cli.runner import call_json
from tokenyard_lab.bench import balance as bench


def test_uneven_routes_are_uneven_and_the_same_experts_are_hot_on_all_ranks():
    job = bench.Job(num_tokens=512)
    counts = [
        torch.bincount(job.routes(rank, 0, uneven=True).topk_ids_TK.flatten(), minlength=64)
        for rank in (0, 1)
    ]
    even = torch.bincount(job.routes(0, 0, uneven=False).topk_ids_TK.flatten(), minlength=64)
    assert counts[0].argmax() == counts[1].argmax()
    assert counts[0].max() > 6 * counts[0].float().mean()
    assert even.max() < 2 * even.float().mean()


def test_uneven_load_is_measured_before_and_after_and_a_move_beside_a_copy(monkeypatch):
    monkeypatch.setitem(bench.LARGE_EXPERTS, "hidden_size", 64)
    monkeypatch.setattr(bench, "launch", lambda *given, **_: launch_threads(*given))
    sizes = ("--hidden-size", 32, "--intermediate-size", 16, "--num-experts", 16, "--top-k", 1)
    found = call_json("bench", "balance", "--ranks", 4, "--zipf", 2, *sizes, "--rounds", 2)
    assert (found["benchmark"], found["unit"], found["setup"]["ranks"]) == ("balance", "ms", 4)
    uniform, before, after, move, pause = found["results"]
    assert before["details"]["busiest / mean"] > 1.3 > after["details"]["busiest / mean"]
    assert after["target"] == 1.15 * uniform["ours"]["median"]
    assert move["target"] == 2 * move["floor"]["median"]
    assert move["details"]["moved_MB"] > 0
    assert pause["target"] == 5.0
    assert pause["floor"] is None


def launch_threads(*given):
    from tokenyard import launch

    return launch(*given)
