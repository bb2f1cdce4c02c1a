"""What a trainer needs beside the layers: losses that balance experts, biases, and the norm of all gradients.

One meaning holds everywhere: gradients are those of the *sum of all ranks' losses*. A loss is therefore this rank's
share of the loss of the whole batch, and the shares of all ranks add up to it. The library divides by no number of
ranks.

    load = batch_load(routes, num_experts, group)          counts of the whole batch: integers
    loss = balance_loss(logits, routes, load)              this rank's share, which the caller adds to its loss
    norm = clip_gradients(model, 1.0)                      the norm over all experts of all ranks
    update_bias(router.choice_bias_E, load.choices_E, 1e-3)    after the step, without a loss
"""

from tokenyard.training.balance import BatchLoad, balance_loss, batch_load, update_bias, z_loss
from tokenyard.training.clipping import clip_gradients, gradient_norm

__all__ = [
    "BatchLoad",
    "balance_loss",
    "batch_load",
    "clip_gradients",
    "gradient_norm",
    "update_bias",
    "z_loss",
]
