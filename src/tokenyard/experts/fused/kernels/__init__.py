"""A rank's experts as Triton kernels, from the rows that arrived to the results that `combine` reads.

    sorting            which pairs of a row and an expert there are, sorted by expert, and cut into tiles
    arguments          what kernels are given, by what it is, and the loop over tiles that products share
    decoding           a tile of weights or of rows, in any format, as numbers
    products           the two matrix products, outputs × rows, with the activation and the weights inside them
    rows_first         the first for many rows, rows × outputs; rows_first_result: the second, of e4m3
    fp8_split          what stands between products of e4m3: numbers as the sum of two e4m3 numbers, or e4m3 codes
    row_blocks         rows of mxfp8 as blocks of e4m3, which tensor cores multiply as they are
    tma                both for many rows of 16-bit numbers, with matrices that come by TMA
    specialized        both of e4m3 or of 16-bit numbers, by warps that load and warps that multiply (specialized_loads,
                       specialized_stores)
    items              what blocks that stay take one after the other
    packed, unpacking  both with 4-bit weights in the order of Hopper's tensor cores
    packed_codes       both with packed mxfp4 weights and rows of e4m3, by warps that load and warps that multiply
    packed_numbers     both with packed weights and rows of bf16, likewise
    expanding          packed mxfp4 weights as blocks of e4m3, for many rows
    summing            a row's experts, added up
    twins              what some of them must give, in torch

Only `tokenyard.experts.fused` imports these modules: Triton is not needed on a CPU.
"""
