"""Benchmarks. Each figure is compared with its floor: the least time that the machine allows."""
