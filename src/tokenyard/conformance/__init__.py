"""Checks that any exchange, format or experts must pass, and the references that results are compared with.

- `suites`: named checks, also for classes outside of this package: `check_exchange`, `check_format`, `check_experts`.
- `cases` and `draws`: random layers on random numbers of ranks, drawn from a seed. Their results are compared with
- `twin`: one process that computes what all ranks do, bit for bit, and
- `oracle`: the layer in float64, with a bound on the error.
"""
