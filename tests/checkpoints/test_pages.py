"""Which pages of a file are given back, and when, byte by byte; and the figures of a conversion."""

import math
import mmap
import sys

import pytest
import torch

from tests.checkpoints.small import Small, save
from tokenyard.checkpoints import convert, open_checkpoint
from tokenyard.checkpoints.files import _Map

PAGE, NEIGHBORS = mmap.PAGESIZE, 2 * 1024 * 1024


class Pages:
    """Memory of so many bytes, which notes what it is told."""

    def __init__(self, size):
        self.size, self.told = size, []

    def __len__(self):
        return self.size

    def madvise(self, advice, first, length):
        assert advice == mmap.MADV_DONTNEED
        self.told.append((first, first + length))


def given_back(size, *reads, beside=0):
    """What is given back by readers of these bytes, of which the last ones may not be done."""
    mapped = _Map(Pages(size))
    mapped.readers = len(reads) + beside
    for first, last in reads:
        mapped.give_back(first, last)
    assert mapped.readers == beside
    return mapped, mapped.pages.told


def test_whole_pages_go_at_once_and_their_neighbors_with_the_last_reader():
    size = 10 * NEIGHBORS
    mapped, told = given_back(size, (PAGE + 1, 3 * PAGE + 5), (5 * NEIGHBORS, 5 * NEIGHBORS + PAGE), beside=1)
    assert told == [(2 * PAGE, 3 * PAGE), (5 * NEIGHBORS, 5 * NEIGHBORS + PAGE)]
    assert (mapped.first, mapped.last) == (PAGE + 1, 5 * NEIGHBORS + PAGE)
    mapped.give_back(3 * NEIGHBORS, 3 * NEIGHBORS + 1)  # less than a page
    assert told[2:] == [(0, 6 * NEIGHBORS + PAGE)]
    assert (mapped.readers, mapped.first, mapped.last) == (0, sys.maxsize, 0)


@pytest.mark.parametrize(
    ("first", "last", "told"),
    [
        (0, 1, [(0, 1 + NEIGHBORS)]),
        (PAGE, 2 * PAGE, [(PAGE, 2 * PAGE), (0, 2 * PAGE + NEIGHBORS)]),
        (PAGE + 1, 2 * PAGE, [(0, 2 * PAGE + NEIGHBORS)]),
        (4 * NEIGHBORS - 1, 4 * NEIGHBORS, [(2 * NEIGHBORS, 5 * NEIGHBORS)]),
        (4 * NEIGHBORS, 4 * NEIGHBORS + 1, [(3 * NEIGHBORS, 5 * NEIGHBORS + 1)]),
        (10 * NEIGHBORS - 1, 10 * NEIGHBORS, [(8 * NEIGHBORS, 10 * NEIGHBORS)]),  # the file ends there
    ],
)
def test_neighbors_up_to_two_mebibytes_on_either_side_go_too(first, last, told):
    assert given_back(10 * NEIGHBORS, (first, last))[1] == told


def test_what_was_read_before_is_forgotten_when_nobody_reads():
    mapped, told = given_back(10 * NEIGHBORS, (9 * NEIGHBORS, 9 * NEIGHBORS + 1))
    mapped.readers += 1
    mapped.give_back(4 * NEIGHBORS, 4 * NEIGHBORS + 1)
    assert told == [(8 * NEIGHBORS, 10 * NEIGHBORS), (3 * NEIGHBORS, 5 * NEIGHBORS + 1)]


@pytest.mark.parametrize("weights", ["mxfp4", "fp8_block128"])
def test_figures_of_a_conversion(tmp_path, weights):
    small = Small(num_experts=3, hidden_size=96, intermediate_size=32, num_layers=1)
    source = open_checkpoint(save(tmp_path / "plain", small.tensors(), small.config()))
    plain = source.experts(0)
    read_before, told = source.bytes_read, []
    assert read_before > 0
    written = convert(source, weights, tmp_path / "out", progress=lambda *news: told.append(news))
    total = source.shared_nbytes + source.experts_nbytes
    assert told[0] == ("shared weights", 0, total)
    assert {of for _, _, of in told} == {total}
    assert [told[-1][1], max(done for _, done, _ in told)] == [
        total,
        total,
    ]  # what was read before does not count
    (layer,) = written.layers
    back = open_checkpoint(tmp_path / "out").experts(0)
    lost = [(back.w13.decode() - plain.w13.float()), (back.w2.decode() - plain.w2.float())]
    error = sum(float(one.double().square().sum()) for one in lost)
    whole = sum(float(one.double().square().sum()) for one in (plain.w13, plain.w2))
    assert layer.relative_error == pytest.approx(math.sqrt(error / whole), rel=1e-5)
    assert 0.01 < layer.relative_error < 0.2
    assert (layer.bytes_before, layer.num_experts) == (plain.nbytes, 3)
    stored = open_checkpoint(tmp_path / "out")
    assert layer.bytes_after == sum(
        tensor.nbytes for name, tensor in stored.tensors.items() if ".experts." in name
    )
    assert (written.bytes_before, written.bytes_after) == (source.nbytes, stored.nbytes)


def test_weights_of_zeros_lose_nothing(tmp_path):
    small = Small(num_experts=2, hidden_size=64, intermediate_size=32, num_layers=1)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in small.tensors().items()}
    source = open_checkpoint(save(tmp_path / "plain", tensors, small.config()))
    assert convert(source, "mxfp8", tmp_path / "out").layers[0].relative_error == 0.0
