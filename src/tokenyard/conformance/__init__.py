"""What any exchange, format or experts must satisfy, and what results are held against.

- `suites`: named checks for a class of anybody's: `check_exchange`, `check_format`, `check_experts`.
- `cases` and `draws`: random layers on random ranks, from a seed, each held against
- `twin`: one process that does what all ranks do, bitwise, and
- `oracle`: the layer in float64, with a bound.
"""
