"""Which kernels compute the products of fused experts: the table says what chooses each, and all are chosen."""

import json
import os
import subprocess
import sys

import pytest

from docs.generate.kernel_paths import PATHS
from tests.experts.chosen_paths import ROWS
from tokenyard.experts.fused.paths import Path, of_call, of_product
from tokenyard.experts.fused.tile_configs import (
    CodesTileConfig,
    NumbersTileConfig,
    PackedTileConfig,
    TileConfig,
    TileConfigs,
)

# Kernels that compute no product.
OTHERS = {
    *("sort_pairs", "count_chunks", "place_chunks", "sum_rows", "round_numbers"),
    *("recode_rows", "decode_rows"),
}


@pytest.fixture(scope="module")
def chosen():
    """What chose each kernel, in a process whose kernels Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.experts.chosen_paths"]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=280)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize("path", PATHS, ids=lambda chosen: chosen.path.value)
def test_each_path_is_chosen_by_what_the_table_says(path, chosen):
    found = [chosen[kernel] for kernel in path.kernels]

    def by(what):
        return {value for kernel in found for value in kernel[what]}

    assert by("gpus") == set(path.gpus)
    assert by("weights") == set(path.weights)
    assert by("inner") == set(path.inner)
    assert min(by("sizes")) == path.multiple
    assert min(by("rows")) == min(rows for rows in ROWS if rows > path.above)
    assert max(by("rows")) == max(rows for rows in ROWS if rows <= path.up_to)


def test_no_other_kernel_computes_products(chosen):
    assert chosen.keys() - OTHERS == {kernel for path in PATHS for kernel in path.kernels}


PLAIN, SPECIALIZED = TileConfig(64, 16, 128, 4, 3), TileConfig(256, 128, 64, 8, 4, specialized=True)
CALLS = [
    (PLAIN, False, True, Path.PRODUCTS),
    (SPECIALIZED, False, True, Path.SPECIALIZED),
    (SPECIALIZED, False, False, Path.PRODUCTS),
    (SPECIALIZED, True, True, Path.EXPANDED),
    (PackedTileConfig(((8, 0),), 1, 2, 4, 8), True, False, Path.PACKED),
    (NumbersTileConfig(2, (16,), 4), True, False, Path.PACKED_NUMBERS),
    (CodesTileConfig(2, 4), True, True, Path.PACKED_CODES),
]


@pytest.mark.parametrize(("config", "packed", "specialized", "path"), CALLS)
def test_tiles_and_weights_choose_the_path_of_a_call(config, packed, specialized, path):
    tiles = TileConfigs(config, config)
    assert of_call(tiles, packed=packed, specialized=specialized) is path


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_product_has_the_path_that_its_tiles_want_where_it_is_possible(tma, blocks):
    def chosen(**flags):
        return of_product(TileConfig(256, 128, 64, 8, 4, **flags), tma=tma, blocks=blocks)

    assert chosen() is Path.PRODUCTS
    assert chosen(tma=True) is (Path.TMA if tma else Path.PRODUCTS)
    assert chosen(rows_first=True) is (Path.ROWS_FIRST if blocks else Path.PRODUCTS)
