"""The one-sided exchange as Triton kernels: what the CPU ranks do with memory, in the words of a GPU.

    numerics   the formats, for a tile of a row
    flags      publishing, waiting, giving up
    push       dispatch: count the rows for each rank, encode them and write them where they go
    pull       combine: write results where their owners find them, read them, add them up
    twins      the same in plain torch, which says what the kernels compute

Only what `tokenyard.exchange.one_sided.cuda` is made of imports these modules: Triton is not needed on a CPU.
"""
