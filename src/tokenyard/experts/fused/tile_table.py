"""The fastest tile configurations, found by a sweep on one H200 (`bench/results/experts-sweep-h200.json`).

`python -m lab.tests.bench.tile_sweep` makes such a sweep, on any GPU.

For each weight format there are lines: the most rows per expert, on average, for which a line is used, and the tile
configurations of the first product and of the second. Formats that were not swept use the lines of a similar one.
"""

from __future__ import annotations

from math import inf
from typing import Any

# The most rows per expert, the configuration of the first product, and that of the second.
Lines = tuple[tuple[float, tuple[Any, ...], tuple[Any, ...]], ...]

# The fields of `TileConfig`: out, tile, block, warps, stages, tail; rows_first, tma, specialized.
PLAIN: dict[str, Lines] = {
    "bf16": (
        (20, (64, 16, 128, 4, 5, 0), (128, 16, 128, 8, 3, 0)),
        (80, (256, 64, 64, 8, 4, 32), (256, 64, 64, 8, 4, 32)),
        (inf, (256, 128, 64, 8, 4, 64, False, True), (256, 128, 64, 8, 4, 64, False, True)),
    ),
    # With specialized warps, and without: V4-Flash's experts with 1,536 rows each took 4,176 and 4,708 µs, with 24 rows
    # 384 and 391; V4-Pro's with 16 rows 1,472 and 1,924; A's with 32 rows 678 and 699 (714 in tiles of 32), with 8 rows
    # 656 and 649; V4-Pro's with one row 901 and 892. With a launch for each product, and one for both: A's with 256
    # rows 1,499 and 1,376, V4-Flash's with 192 rows 683 and 644.
    "bf16, specialized": (
        (12, (64, 16, 128, 4, 5, 0), (128, 16, 128, 8, 3, 0)),
        (28, (256, 32, 64, 8, 4, 0, False, False, True), (256, 32, 64, 8, 4, 0, False, False, True)),
        (80, (256, 64, 64, 8, 4, 32, False, False, True), (256, 64, 64, 8, 4, 32, False, False, True)),
        (inf, (256, 128, 64, 8, 4, 64, False, True, True), (256, 128, 64, 8, 4, 64, False, True, True)),
    ),
    "fp8_block128": (
        (20, (256, 16, 256, 4, 3, 0), (128, 16, 128, 4, 3, 0)),
        (80, (256, 64, 128, 8, 4, 0, True), (128, 64, 128, 4, 3, 32)),
        (inf, (256, 128, 128, 8, 4, 64, True), (256, 128, 128, 8, 3, 64, True)),
    ),
    # In tiles of 32 rows, and of 128: V4-Pro's experts with 16 rows each took 757 and 777 µs (798 in tiles of 16),
    # V4-Flash's with 24 rows 212 and 225, V3's with 32 rows 410 and 380 (381 in tiles of 64). In tiles of 16, and
    # without specialized warps: V4-Flash's with 8 tokens a rank 152 and 160, V3's 295 and 309, V4-Pro's 464 and 475.
    "fp8_block128, specialized": (
        (12, (256, 16, 128, 4, 5, 0, False, False, True), (128, 16, 128, 4, 3, 0, False, False, True)),
        (28, (256, 32, 128, 4, 4, 0, False, False, True), (128, 32, 128, 4, 3, 0, False, False, True)),
        (inf, (256, 128, 128, 8, 4, 64, True, False, True), (256, 128, 128, 8, 3, 64, True, False, True)),
    ),
    # Weights are decoded for rows in another format. Not swept; these configurations have no register spills.
    "fp8_block128 for other rows": (
        (20, (256, 16, 64, 8, 5, 0), (128, 16, 128, 4, 3, 0)),
        (80, (256, 64, 128, 8, 4, 0), (128, 64, 128, 4, 3, 0)),
        (inf, (256, 64, 64, 8, 4, 0), (256, 64, 128, 8, 4, 0, True)),
    ),
    # For weights that are decoded in registers. (Recoded weights use the lines of fp8_block128.)
    "mxfp8": (
        (20, (128, 16, 128, 4, 3, 0), (128, 16, 128, 4, 3, 0)),
        (80, (128, 64, 128, 4, 3, 0), (128, 64, 128, 4, 3, 0)),
        (inf, (256, 128, 128, 8, 3, 64), (256, 128, 128, 8, 3, 64)),
    ),
    # For weights that are decoded in registers, on GPUs without kernels for packed weights.
    "mxint4": (
        (20, (64, 16, 128, 4, 3, 0), (64, 16, 128, 4, 3, 0)),
        (80, (64, 64, 128, 4, 3, 0), (64, 64, 128, 4, 3, 0)),
        (inf, (128, 128, 64, 8, 3, 0), (128, 128, 64, 8, 3, 0)),
    ),
    # Numbers have twice the bytes of bf16, so blocks are smaller.
    "fp32": (
        (20, (64, 16, 32, 4, 3, 0), (64, 16, 32, 4, 3, 0)),
        (inf, (64, 64, 32, 4, 3, 0), (64, 64, 32, 4, 3, 0)),
    ),
}
# Boxed weights with few rows are faster with specialized warps, too; rows that these cannot load have the plain tiles.
# Specialized with boxes, specialized without, and plain: V4-Flash's experts with 8 tokens a rank took 282.8, 292.7 and
# 294.6 µs, V4-Pro's 871.4 with boxes and 892.1 plain. A's with 8 rows each took 1.03 times their floor with boxes, and
# 1.06 times it plain, on different GPUs.
PLAIN["bf16, boxed"] = (
    (12, (64, 16, 128, 4, 5, 0, False, False, True), (128, 16, 128, 8, 3, 0, False, False, True)),
    *PLAIN["bf16, specialized"][1:],
)
ALIKE = {"fp16": "bf16", "mxfp4": "mxint4", "nvfp4": "mxint4"}

# Rows per expert from which on packed mxfp4 weights are expanded to e4m3 before the products, if that is possible and
# they cannot be decoded to codes in the products. Expanded, and packed: V4-Flash's with 192 rows
# each took 749 and 764 µs, V4-Pro's with 128 2,527 and 2,188.
EXPANDED_FROM = 154

# Rows per expert from which on the products decode packed mxfp4 weights to e4m3 codes; then, by the most rows, the
# fields of `CodesTileConfig`: runs of 64 rows, and stages. As codes, and packed: V4-Flash's with 48 rows each
# took 280 and 247 µs, with 96 rows 365 and 444; with 192 rows 579 in four runs, 662 in two, 721 expanded.
CODES_FROM = 65
CODES = ((109, (2, 4)), (154, (3, 4)), (272, (4, 4)))

# The rows per expert above which, and up to which, `kernels.packed_numbers` multiplies packed weights with bf16 rows;
# then the fields of `NumbersTileConfig`: units, widths, stages. C's with 32 rows each took 688 µs this way, and 804 by
# the tiles of `PACKED`. With fewer rows, and in other formats, it was slower.
NUMBERS: dict[str, tuple[float, float, tuple[Any, ...]]] = {
    "mxfp4": (28, 40, (2, (16, 32, 64), 5)),
}

# The fields of `PackedTileConfig`: widths, groups, ahead, stages, warps, registers.
PACKED = {
    "mxint4": (
        (0.4, (((8, 0),), 1, 6, 8, 8, None), (((8, 0),), 2, 3, 4, 8, None)),
        (4.5, (((8, 0),), 2, 2, 4, 8, None), (((8, 0),), 1, 3, 4, 8, None)),
        (18, (((16, 0),), 2, 2, 4, 8, None), (((16, 0),), 2, 2, 4, 4, None)),
        (36, (((16, 0), (32, 0)), 1, 4, 4, 8, 128), (((16, 0), (32, 0)), 1, 4, 4, 8, 128)),
        (inf, (((32, 0), (64, 32)), 2, 2, 4, 8, None), (((32, 0), (64, 32)), 2, 2, 4, 8, None)),
    ),
    "mxfp4": (
        # Warm and rested, V4-Pro's with 1 row each took 266.6 and 257.2 µs with this line, 270.8 and 254.3 with the
        # next, and 292.3 and 265.1 with one group of 8 warps. V4-Flash's with 1.5 rows took 96.5 and 94.9 there.
        (1.2, (((8, 0),), 2, 2, 4, 8, 128), (((8, 0),), 2, 2, 4, 8, 128)),
        (3, (((8, 0),), 2, 2, 4, 8, None), (((8, 0),), 1, 3, 4, 8, None)),
        (12, (((8, 0), (16, 0)), 2, 2, 4, 4, None), (((8, 0), (16, 0)), 2, 2, 4, 4, None)),
        # Two groups of 8 warps share the rows that they load. Warm and rested, V4-Pro's with 16 rows each took 564.9
        # and 513.3 µs, and 603.1 and 548.6 with one group; V4-Flash's with 24: 175.9 and 170.2, and 180.3 and 174.3.
        (28, (((16, 0), (32, 0)), 2, 2, 4, 8, 128), (((16, 0), (32, 0)), 2, 2, 4, 8, 128)),
        (80, (((32, 0), (64, 0)), 1, 3, 3, 8, 128), (((32, 0), (64, 0)), 1, 2, 4, 8, 128)),
        (inf, (((32, 0), (64, 32)), 2, 2, 4, 8, None), (((32, 0), (64, 32)), 2, 2, 4, 8, None)),
    ),
    "nvfp4": (
        (0.4, (((8, 0),), 1, 6, 8, 8, None), (((8, 0),), 2, 2, 4, 8, None)),
        (4.5, (((8, 0),), 2, 2, 4, 8, None), (((8, 0),), 1, 3, 4, 8, None)),
        (18, (((16, 0),), 2, 2, 4, 4, None), (((16, 0),), 2, 2, 4, 4, None)),
        (36, (((16, 0), (32, 0)), 1, 3, 4, 8, 128), (((16, 0), (32, 0)), 1, 3, 4, 8, 128)),
        (inf, (((32, 0), (64, 32)), 2, 2, 4, 8, None), (((32, 0), (64, 32)), 2, 2, 4, 8, None)),
    ),
}
