"""A rank's experts as Triton kernels, from the rows that arrived to the results that `combine` reads.

    sorting    which pairs of a row and an expert there are, sorted by expert, and cut into tiles
    row_blocks rows of mxfp8 as blocks of e4m3, which tensor cores multiply as they are
    decoding   a tile of weights or of rows, in any format, as numbers
    products   the two matrix products, with the activation and the weighted sum inside them
    boxed      the same for many rows of 16-bit numbers, with matrices that come by TMA

Only `tokenyard.experts.fused` imports these modules: Triton is not needed on a CPU.
"""
