"""A rank's experts as Triton kernels, from the rows that arrived to the results that `combine` reads.

    sorting            sorts the pairs of rows and experts by expert, and cuts them into tiles
    arguments          the groups of arguments of kernels, and the loop over tiles that products share
    decoding           loads a tile of weights or of rows, in any format, as numbers
    products           both matrix products, as outputs × rows, with activation, bias and routing weight
    rows_first         the first product for many rows, as rows × outputs
    rows_first_result  the second product for many rows, of e4m3, as rows × outputs
    fp8_split          the activation between products of e4m3: as sums of two e4m3 numbers, or as e4m3 codes
    row_blocks         recodes rows of mxfp8 to blocks of e4m3, which tensor cores multiply without decoding
    tma                both products for many rows of 16-bit numbers, with matrices loaded by TMA
    specialized        both products of e4m3 or 16-bit numbers, with specialized warps: some load, others multiply
                       (specialized_loads, specialized_stores)
    items              the work queue of persistent blocks
    packed, unpacking  both products with packed 4-bit weights
    packed_codes       both products of packed mxfp4 weights and rows of e4m3, with specialized warps
    packed_numbers     both products of packed weights and rows of bf16, with specialized warps
    expanding          expands packed mxfp4 weights to blocks of e4m3, for many rows
    summing            sums the results of a row's experts
    twins              the torch twins of the sort and of row_blocks

Only `tokenyard.experts.fused` imports these modules, so that Triton is not needed on a CPU.
"""
