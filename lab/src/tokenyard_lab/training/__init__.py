"""How the shipped model is trained: problems, network, and runs whose bits do not depend on the number of ranks.

`python -m tokenyard_lab.training --ranks 4 --steps 200 --out run` trains on ranks of this machine (`__main__`).
`train` is the script that made the weights that ship, on one GPU.
"""
