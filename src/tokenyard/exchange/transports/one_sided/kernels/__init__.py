"""The one-sided exchange as Triton kernels: the protocol of `one_sided.cpu`, between GPUs.

    numerics   the formats, for a tile of a row
    flags      publish flags, wait for other ranks, give up at the deadline
    push       dispatch: count the rows for each rank, encode them and write them where they go
    pull       combine: write results into this rank's combine region; read those of all ranks, and sum them
    twins      what the kernels compute, in plain torch

Only `one_sided.cuda` imports these modules: Triton is not needed on a CPU.
"""
