"""Hosts on one machine, for tests and benchmarks: network namespaces with a link each, on a switch that can fail."""
