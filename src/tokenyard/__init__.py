"""tokenyard: an expert-parallel Mixture-of-Experts (MoE) layer for PyTorch that cannot be wired wrong.

It sends every token row to the ranks that own its experts, runs the experts there, and brings the results
home.

The shapes, by letter; a tensor that crosses a function carries them in its name (`x_TH`):

    T  tokens on this rank           W  ranks in the group
    H  hidden size                   R  rows received by this rank
    P  hidden size, padded           L  experts on this rank
    K  experts per token             I  intermediate size
    E  experts in the layer          N  (received row, expert) pairs
"""
