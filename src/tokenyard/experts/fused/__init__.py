"""Experts as Triton kernels, which read rows out of the workspace and write results into it."""

from tokenyard.experts.fused.experts import FusedExperts

__all__ = ["FusedExperts"]
