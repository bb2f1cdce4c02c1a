"""`one_sided`: ranks write into, and read from, each other's memory. On CPUs `shared_memory`, on GPUs `cuda`."""
