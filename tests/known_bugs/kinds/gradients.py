"""Bugs of training: gradients of the wrong sum, of other routes, or of nothing; and what trainers count beside them."""

import torch

from tests.known_bugs.known_bug import BugKind, ExchangeCheck, KnownBug, TrainerCheck, trains
from tokenyard.exchange import Announcement, Exchange
from tokenyard.exchange.results import RowsAtHome
from tokenyard.formats import Mxfp8
from tokenyard.layer import training
from tokenyard.training import balance, clipping


def divides_by_the_ranks(patch):
    right = training._Backward.run

    def run(self, dy_TH):
        dx_TH, dweights_TK, sums = right(self, dy_TH)
        world = self._layer.plan.group.size
        return dx_TH, dweights_TK, {name: total / world for name, total in sums.items()}

    patch.setattr(training._Backward, "run", run)


def first_ranks_gradients_only(patch):
    right = RowsAtHome.summands

    def summands(self):
        rows, tokens = right(self)
        if self.places is None:  # no gradients
            return rows, tokens
        return rows[:1], tokens[:1]  # each rank has summed its own experts, hasn't it?

    patch.setattr(RowsAtHome, "summands", summands)


def router_gradient_detached(patch):
    right = training._Backward.run

    def run(self, dy_TH):
        dx_TH, dweights_TK, sums = right(self, dy_TH)
        return dx_TH, torch.zeros_like(dweights_TK), sums

    patch.setattr(training._Backward, "run", run)


def nothing_for_idle_ranks(patch):
    right = training._Backward.run

    def run(self, dy_TH):
        dx_TH, dweights_TK, sums = right(self, dy_TH)
        came = any(len(kept.routes.pairs) for kept in self._passes)
        return dx_TH, dweights_TK, sums if came else {}

    patch.setattr(training._Backward, "run", run)


def multiplies_nobody_by_zero(patch):
    right = training._Backward.run

    def run(self, dy_TH):
        dx_TH, dweights_TK, sums = right(self, dy_TH)
        return dx_TH, dweights_TK + 0.0 * self._weights_TK, sums  # nobody's weight times zero

    patch.setattr(training._Backward, "run", run)


def quantizes_gradients(patch):
    right = Exchange.encode

    def encode(self, spec, x_TH):
        if spec.of_gradients:  # rows are quantized on this way, and these are rows
            x_TH = Mxfp8().encode(x_TH).decode(x_TH.dtype)
        return right(self, spec, x_TH)

    patch.setattr(Exchange, "encode", encode)


def compares_no_routes(patch):
    patch.setattr(training, "_checksum", lambda ids_TK: 0)


def counts_recomputations(patch):
    patch.setattr(training, "is_recomputed", lambda: False)


def forgets_which_forward(patch):
    right = Announcement.place.fget
    patch.setattr(Announcement, "place", property(lambda self: (*right(self)[:-1], 0)))


def makes_no_node_for_frozen_ranks(patch):
    right = training.Tape.attach

    def attach(self, trip, call, y_TH):
        tensors = (call.inputs.x_TH, *self.weights.parts().values())
        trained = any(tensor.requires_grad for tensor in tensors)
        return right(self, trip, call, y_TH) if trained else y_TH

    patch.setattr(training.Tape, "attach", attach)


def norm_of_this_ranks_experts(patch):
    patch.setattr(clipping._Sharded, "gathered", lambda self: self.squares)


def balance_loss_of_each_rank_alone(patch):
    right = balance.batch_load

    def batch_load(routes, num_experts, group=None):
        return right(routes, num_experts)  # the group's loss is the mean of its ranks' losses

    patch.setattr("tokenyard.training.batch_load", batch_load)


def padding_counts_as_tokens(patch):
    patch.setattr(balance, "_is_token", lambda ids_TK: torch.ones(len(ids_TK), dtype=torch.bool))


def _check(name, exchange="two_sided", **fields):
    return ExchangeCheck(name=name, exchange=exchange, world=3, **fields)


# -- What trainers compute beside the layer ----------------------------------------------------------------------


def norms_on_ranks(group):
    """The norm of the gradients of a layer, whose experts live on these ranks."""
    return clipping.gradient_norm(trains(group, tokens=12 // group.size))


def balance_on_ranks(group, padding=0):
    """The ranks' shares of the balance loss of 12 tokens, summed; each rank has padding behind its own."""
    import tokenyard.training as trainer
    from tokenyard.routing import SoftmaxRouter

    logits_TE = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)).chunk(group.size)[group.rank]
    logits_TE = torch.cat([2 * logits_TE, torch.zeros(padding, 6)])
    is_token_T = torch.arange(len(logits_TE)) < 12 // group.size
    routes = SoftmaxRouter(2, renormalize=True)(logits_TE, valid_T=is_token_T)
    load = trainer.batch_load(routes, 6, group)
    share = trainer.balance_loss(logits_TE, routes, load).item()
    return round(sum(group.gather_json(share)), 4)


KIND = BugKind(
    name="Gradients",
    about="A loss that falls says little about its gradients: AdamW does not even see a factor. Most of these were "
    "found by somebody who compared two runs that should have been one.",
    bugs=(
        KnownBug(
            name="Expert gradients multiplied by the size of a group",
            seen="PyTorch #160285, and Megatron-LM #7160 and #7165",
            story="Gradients of experts are sums over the tokens of all ranks that send them some. Whoever takes them "
            "for the gradients of one rank's tokens divides by the wrong number: those of the report were twice as "
            "large as the others, with FSDP over half of the ranks. Here gradients are those of the sum of all ranks' "
            "losses, nothing is divided, and `plan.gradient_divisor` is the one number for FSDP.",
            mutate=divides_by_the_ranks,
            caught_by=_check("gradients_within_the_bound"),
            says="the gradients of w13 of a layer",
            also_alive=trains,
        ),
        KnownBug(
            name="A partial sum taken for the whole",
            seen="torchtitan #1878, #2416 and #4054, Transformers #48205, and Automodel #1260",
            story="The gradient of a row is a sum over the ranks of its experts, as its result was. Forwards have "
            "that reduction, and in backwards it was forgotten, time and again. Here both directions are one kind of "
            "round trip, which ends with the sum.",
            mutate=first_ranks_gradients_only,
            caught_by=_check("gradients_within_the_bound"),
            says="the gradients of rows of a layer",
            also_alive=trains,
        ),
        KnownBug(
            name="The router's gradient is lost",
            seen="Automodel #2995, and Transformers #48687",
            story="Routing weights travel to the experts, and their gradients must come back. A gather that is not "
            "differentiated leaves the router without any: the loss is right, it falls, and the router stays what it "
            "was. Here the gradient of each weight is a duty with one party, which paranoid plans count.",
            mutate=router_gradient_detached,
            caught_by=_check("gradients_within_the_bound"),
            says="the gradients of weights of a layer",
            also_alive=trains,
        ),
        KnownBug(
            name="No gradient on a rank whose experts are idle",
            seen="Automodel #2995, and PyTorch #172439 and #193633 (rows past the last offset)",
            story="The experts of a rank may get no token in a step. Its gradients are then None, or what was in "
            "memory, and an optimizer or a reduction over ranks that waits for them stands still, or reads garbage. "
            "They are zeros.",
            mutate=nothing_for_idle_ranks,
            caught_by=_check("no_gradient_is_missing"),
            says="are None; expected numbers",
            also_alive=trains,
        ),
        KnownBug(
            name="NaN of a weight for nobody",
            seen="Transformers #48205, and TransformerEngine #3116",
            story="A choice of nobody has a weight that means nothing. Multiplying it by zero is no way to leave it "
            "out: a NaN stays NaN, and goes from one padding token into the router, and from there everywhere.",
            mutate=multiplies_nobody_by_zero,
            caught_by=_check("no_gradient_is_missing"),
            says="with tokens for nobody are not finite",
            also_alive=trains,
        ),
        KnownBug(
            name="Gradients quantized as rows are",
            story="Rows travel in few bits, and gradients take the same way back. Nobody asked for theirs to be "
            "rounded: they have another range, and errors in them add up over steps. Here they travel in the layer's "
            "dtype, unless `gradient_wire` names a format.",
            mutate=quantizes_gradients,
            caught_by=_check("gradients_within_the_bound"),
            says="beyond the bound",
            also_alive=trains,
        ),
        KnownBug(
            name="A recomputed forward that routes otherwise",
            seen="Automodel #3325, and torchtitan #1593",
            story="Activation checkpointing computes a forward again. If the router then decides otherwise (dropout, "
            "noise, a changed bias), rows of other tokens stand where those of the first forward stood. Where shapes "
            "agree, torch does not notice. A checksum of the first forward's routes does.",
            mutate=compares_no_routes,
            caught_by=_check("recomputed_routes_are_compared"),
            says="that routes otherwise on rank 0",
            also_alive=trains,
        ),
        KnownBug(
            name="Recomputed tokens counted twice",
            seen="torchtitan #3686",
            story="Counts of choices steer balancing. A forward that is computed again counts its tokens again, in "
            "those layers that are checkpointed and in no others; a mend that halves all counts is wrong for the rest.",
            mutate=counts_recomputations,
            caught_by=_check("load_counts_first_forwards"),
            says="`plan.load()` after two steps is",
            also_alive=trains,
        ),
        KnownBug(
            name="Two backwards in another order",
            story="Two micro batches are under way, and one rank goes back through the second one first. Layer, phase "
            "and number of the round agree on all ranks; gradients of one batch meet rows of the other. Here a "
            "backward announces the round of its forward.",
            mutate=forgets_which_forward,
            caught_by=_check("backwards_in_another_order"),
            says="two backwards in another order on rank 0: no error",
            also_alive=trains,
        ),
        KnownBug(
            name="A frozen rank does not come to the backward",
            story="Autograd makes no node where nothing requires a gradient. On a rank where everything is frozen, or "
            "that brings no tokens, the layer then has no backward, and all others wait for it.",
            mutate=makes_no_node_for_frozen_ranks,
            caught_by=_check("frozen_parts_have_none", deadline=2.0),
            says="does not require grad",
            also_alive=trains,
        ),
        KnownBug(
            name="A gradient norm that omits experts",
            seen="Megatron-LM #5916, and Transformers #46126",
            story="A rank computes the norm of what it holds, and adds up over the data-parallel ranks, or over none. "
            "Experts of other ranks are left out. Each rank clips by another factor, and the replicated parameters "
            "drift apart.",
            mutate=norm_of_this_ranks_experts,
            caught_by=TrainerCheck(name="the norm on 3 ranks is that on 1", run=norms_on_ranks),
            says="on 3 ranks",
        ),
        KnownBug(
            name="A balance loss that is a mean of means",
            seen="Megatron-LM #5047 and #5798, and Automodel #1408",
            story="The loss is a product of two means over the batch. The mean of each rank's product is another "
            "number, which depends on how tokens were dealt out, and on the number of ranks. Denominators must be "
            "counts of the whole batch.",
            mutate=balance_loss_of_each_rank_alone,
            caught_by=TrainerCheck(name="the balance loss on 3 ranks is that on 1", run=balance_on_ranks),
            says="on 3 ranks",
        ),
        KnownBug(
            name="Padding counted in the balance loss",
            seen="Megatron-LM #2142, #4777 and #6114, and torchtitan #4594",
            story="Batches are padded, and padding is routed by the same router. Counted as tokens, it makes the loss "
            "smaller, and pulls experts to where the padding goes. Here padding has ids of -1, and counts nowhere.",
            mutate=padding_counts_as_tokens,
            caught_by=TrainerCheck(
                name="the balance loss with padding is that without",
                run=lambda group: balance_on_ranks(group, padding=group.size // 2),
            ),
            says="on 3 ranks",
        ),
    ),
)
