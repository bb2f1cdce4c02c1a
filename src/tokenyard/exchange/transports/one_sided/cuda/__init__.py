"""`one_sided` on GPUs: kernels write and read symmetric memory."""
