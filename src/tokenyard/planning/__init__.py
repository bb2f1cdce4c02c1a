"""What a layer is, who does what, and what all ranks agree on before the first token.

`spec` is what a user asks for, `wiring` assigns every duty of a layer to one party, `drafting` makes a plan of all
layers without a group, `planner` agrees on it with the other ranks. `audit` counts duties in a paranoid plan.
"""
