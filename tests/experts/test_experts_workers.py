"""Experts side by side: the same results, and torch's settings as they were."""

import os
import threading

import pytest
import torch

from tests.experts.expert_cases import Case, build_experts, oracle, run
from tokenyard.experts import grouped, tiles, workers


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_each_item_once_with_one_torch_thread_each(two_threads, monkeypatch) -> None:
    monkeypatch.setattr(workers, "_pools", {})  # threads that start here
    seen: list[tuple[int, int, str]] = []
    workers.for_each(
        lambda i: seen.append((i, torch.get_num_threads(), threading.current_thread().name)), range(50), 2
    )
    assert sorted(i for i, _, _ in seen) == list(range(50))
    assert {threads for _, threads, _ in seen} == {1}
    assert all(name.startswith("tokenyard-experts") for _, _, name in seen)
    assert torch.get_num_threads() == 2
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [2]


def test_errors_come_back() -> None:
    with pytest.raises(ZeroDivisionError):
        workers.for_each(lambda i: 1 // i, [1, 0, 1], 2)


@pytest.mark.parametrize(
    "case", [Case(R=200, L=6, bias=True), Case(R=200, L=6, weights="fp16", H=20)], ids=str
)
def test_sharing_changes_nothing(case: Case, two_threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "cpu_multiplies", lambda _: False)
    shared: list[bool] = []
    for_each = workers.for_each
    monkeypatch.setattr(workers, "for_each", lambda *args: (shared.append(True), for_each(*args)))
    experts, x_RH, routes = build_experts("grouped", case)
    expected_RH, bound_RH = oracle(case)
    y_RH = run(experts, x_RH, routes)
    assert ((y_RH - expected_RH).abs() <= bound_RH).all()
    with torch.inference_mode():
        assert torch.equal(run(experts, x_RH, routes), y_RH)
    assert shared == [True, True]  # by expert, once a call: with ids of -1 the sum has no blocks


def test_after_a_fork(two_threads) -> None:
    workers.for_each(lambda _: None, range(4), 2)
    child = os.fork()
    if child == 0:  # the parent's threads are not here: a pool that was kept would wait for ever
        done: list[int] = []
        workers.for_each(done.append, range(4), 2)
        os._exit(0 if sorted(done) == [0, 1, 2, 3] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("counts", "threads", "worth"),
    [([50, 50], 2, True), ([51, 49], 2, False), ([50, 50], 1, False), ([1, 1, 1], 3, True), ([], 2, False)],
)
def test_experts_are_shared_where_no_thread_would_wait(counts, threads, worth):
    assert workers.worth_sharing(counts, threads) == worth


@pytest.mark.parametrize("tile_elements", [20, 1 << 20])
def test_vectors_are_multiplied_from_memory_that_is_aligned_alike(tile_elements, monkeypatch):
    """However rows lie in their batch: the bits of a product may depend on it."""
    starts, mv = [], torch.mv
    monkeypatch.setattr(torch, "mv", lambda w, x: starts.append(x.data_ptr() % 64) or mv(w, x))
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", tile_elements)
    x_ND, w_LOD = torch.randn(5, 21), torch.randn(1, 3, 21)
    y_NO = tiles.product_by_tiles(x_ND, w_LOD, None, [(0, slice(0, 5))], row_by_row=True)
    assert set(starts) == {0}
    assert len(starts) >= 5
    torch.testing.assert_close(y_NO, x_ND @ w_LOD[0].t())


@pytest.mark.parametrize(
    ("row_by_row", "count", "threads"), [(True, 1, 1), (True, 2, 1), (False, 1, 2), (False, 2, 1)]
)
def test_tiles_are_shared_by_threads_where_there_are_several_or_rows_are_alone(
    row_by_row, count, threads, two_threads, monkeypatch
) -> None:
    """A product of one row is made by one thread: with more of them its bits might be others."""
    seen: list[int] = []
    for name in ("mv", "mm"):
        product = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, p=product, **k: seen.append(torch.get_num_threads()) or p(*a, **k)
        )
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 21 * 4)
    x_ND, w_LOD = torch.randn(3, 21), torch.randn(1, 4 * count, 21)
    y_NO = tiles.product_by_tiles(x_ND, w_LOD, None, [(0, slice(0, 3))], row_by_row=row_by_row)
    assert seen == [threads] * count * (3 if row_by_row else 1)
    torch.testing.assert_close(y_NO, x_ND @ w_LOD[0].t())


def test_a_process_that_is_forked_while_a_thread_holds_the_lock_can_take_it() -> None:
    with workers._pools_lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if workers._pools_lock.acquire(timeout=5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
