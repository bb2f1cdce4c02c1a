"""`one_sided`: ranks write into, and read from, each other's memory.

The package `cpu` serves ranks on CPUs, the package `cuda` those on GPUs, with the kernels of `kernels`.
"""
