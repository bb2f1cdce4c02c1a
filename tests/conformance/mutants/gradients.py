"""Experts and transports that are wrong in gradients, and patches that make the layer's own backward wrong."""

import dataclasses

import torch

from tests.conformance.mutants.changing import Changed, ChangesReceived, ChangesResults
from tokenyard.exchange import Pending, RoundTrip
from tokenyard.experts import ReferenceExperts
from tokenyard.layer import training
from tokenyard.rows import LocalRoutes

# -- Experts -------------------------------------------------------------------------------------------------


class Differentiates(ReferenceExperts):
    """Differentiates as `change` says, by default rightly."""

    trains = ("cpu",)

    def differentiate(self, received, kept, dy_RH, weights, sums):
        return super().differentiate(received, kept, dy_RH, weights, sums)


class DropsRouterGradient(Differentiates):
    """Takes the routing weights for constants."""

    name = "drops_router_gradient"

    def differentiate(self, *given):
        found = super().differentiate(*given)
        return dataclasses.replace(found, weights_N=torch.zeros_like(found.weights_N))


class WeighsGradientsTwice(Differentiates):
    """Weights what comes in, which its products weight as well."""

    name = "weighs_gradients_twice"

    def differentiate(self, received, kept, dy_RH, weights, sums):
        first_R1 = received.routes.weights_RK.nan_to_num()[:, :1]
        return super().differentiate(received, kept, dy_RH * first_R1, weights, sums)


class LeavesIdleExpertsAsTheyWere(Differentiates):
    """Hands out sums of fresh memory: nobody writes into those of idle experts."""

    name = "leaves_idle_experts_as_they_were"

    def differentiate(self, received, kept, dy_RH, weights, sums):
        found = super().differentiate(received, kept, dy_RH, weights, sums)
        for expert in set(range(self.spec.num_local_experts)) - set(
            received.routes.ids_RK.flatten().tolist()
        ):
            for total in sums.values():
                total[expert] = 7.0
        return found


class GivesNobodyToTheFirst(Differentiates):
    """Adds the gradients of choices of -1 to the first expert."""

    name = "gives_nobody_to_the_first"

    def differentiate(self, received, kept, dy_RH, weights, sums):
        nobody_RK = received.routes.ids_RK < 0
        for total in sums.values():
            total[0] += (nobody_RK.sum(dim=1, keepdim=True) * dy_RH).sum()
        return super().differentiate(received, kept, dy_RH, weights, sums)


class HidesNanOfGradients(Differentiates):
    name = "hides_nan_of_gradients"

    def differentiate(self, received, kept, dy_RH, weights, sums):
        found = super().differentiate(received, kept, dy_RH, weights, sums)
        for total in sums.values():
            total.nan_to_num_()
        return found


class CountsDuplicatesOnce(Differentiates):
    name = "counts_duplicates_once"

    def differentiate(self, received, kept, dy_RH, weights, sums):
        found = super().differentiate(received, kept, dy_RH, weights, sums)
        ids_RK = received.routes.ids_RK
        again_RK = torch.zeros_like(ids_RK, dtype=torch.bool)
        for choice in range(1, ids_RK.shape[1]):
            again_RK[:, choice] = (ids_RK[:, choice : choice + 1] == ids_RK[:, :choice]).any(dim=1)
        there_N = again_RK[ids_RK >= 0]
        return dataclasses.replace(found, rows_NH=found.rows_NH.masked_fill(there_N.unsqueeze(1), 0.0))


class RecomputesInBf16(Differentiates):
    """Computes the first product again in fewer bits than it was."""

    name = "recomputes_in_bf16"

    def differentiate(self, received, kept, dy_RH, weights, sums):
        if kept is None:
            rounded = dataclasses.replace(weights, w13=weights.w13.bfloat16().to(weights.w13.dtype))
            return super().differentiate(received, kept, dy_RH, rounded, sums)
        return super().differentiate(received, kept, dy_RH, weights, sums)


class AddsToTheLastStep(Differentiates):
    """Keeps one buffer for sums, and never clears it."""

    name = "adds_to_the_last_step"

    def differentiate(self, received, kept, dy_RH, weights, sums):
        found = super().differentiate(received, kept, dy_RH, weights, sums)
        before = self.__dict__.setdefault("before", {})
        for name, total in sums.items():
            total.add_(before.get(name, 0.0))
            before[name] = total.clone()
        return found


class StopsAtFrozenWeights(Differentiates):
    """Takes frozen weights as a sign that nothing behind them is trained."""

    name = "stops_at_frozen_weights"

    def differentiate(self, received, kept, dy_RH, weights, sums):
        found = super().differentiate(received, kept, dy_RH, weights, sums)
        if "w13" in sums:
            return found
        return dataclasses.replace(found, rows_NH=torch.zeros_like(found.rows_NH))


class ScalesByTheBatch(Differentiates):
    """Scales gradients by the largest of the batch, in a type with few bits."""

    name = "scales_by_the_batch"

    def differentiate(self, received, kept, dy_RH, weights, sums):
        scale = dy_RH.abs().amax().clamp(min=1e-9) if dy_RH.numel() else 1.0
        return super().differentiate(received, kept, (dy_RH / scale).half().float() * scale, weights, sums)


# -- Transports ----------------------------------------------------------------------------------------------


class Placing(Changed):
    def placed(self, payload):
        return self.transport.change_placed(self.home.placed(payload))


class ChangesGradients(ChangesResults):
    """Changes what comes home in backwards only."""

    def send_back(self, results):
        pending = super(ChangesResults, self).send_back(results)
        if not results.arrival.spec.of_gradients:
            return pending
        return Pending(lambda: Placing(self, results.arrival, pending.wait()))

    def change_placed(self, numbers_TK):
        return numbers_TK


class HalvesGradients(ChangesGradients):
    """Takes a mean over two ranks where a sum is due."""

    name = "halves_gradients"

    def change(self, arrival, y_TH):
        return y_TH.mul_(0.5)


class LosesWhatComesBeside(ChangesGradients):
    """Brings rows home, and nothing of what comes beside them."""

    name = "loses_what_comes_beside"

    def change_placed(self, numbers_TK):
        return torch.zeros_like(numbers_TK)


class MovesGradientsToTheFirstChoice(ChangesGradients):
    name = "moves_gradients_to_the_first_choice"

    def change_placed(self, numbers_TK):
        return numbers_TK.roll(1, dims=1)


class ForgetsNobodyInBackward(ChangesReceived):
    """Takes -1 for the first expert, in backwards."""

    name = "forgets_nobody_in_backward"

    def send(self, batch):
        self.of_gradients = batch.spec.of_gradients
        return super().send(batch)

    def change(self, received):
        if not self.of_gradients:
            return received
        routes = received.routes
        changed = LocalRoutes(ids_RK=routes.ids_RK.clamp(min=0), weights_RK=routes.weights_RK)
        return dataclasses.replace(received, routes=changed)


# -- The layer's own backward ----------------------------------------------------------------------------------


def keeps_every_tape(patch):
    right, kept = training.Tape.attach, []

    def attach(self, trip, call, y_TH):
        y_TH = right(self, trip, call, y_TH)
        kept.append(y_TH)
        return y_TH

    patch.setattr(training.Tape, "attach", attach)


def keeps_one_forward(patch):
    """What a layer keeps of a forward is overwritten by its next forward."""
    right = training.KeptPass.again

    def again(self, saved):
        found = right(self, saved)
        return training.KeptPass.last or found

    def remember(received, product, keep):
        training.KeptPass.last = made(received, product, keep)
        return training.KeptPass.last

    made = training.KeptPass.of
    patch.setattr(training.KeptPass, "last", None, raising=False)
    patch.setattr(training.KeptPass, "of", staticmethod(remember))
    patch.setattr(training.KeptPass, "again", again)


def keeps_errors_of_backwards(patch):
    """An error of a backward is raised before its round trip, where no other rank hears of it."""
    right = training._Node.backward

    def backward(ctx, dy_TH):
        ctx.saved_tensors  # noqa: B018
        return right(ctx, dy_TH)

    patch.setattr(training._Node, "backward", staticmethod(backward))


def computes_otherwise_under_grad(patch):
    """The forward that keeps something is another one than that of inference."""
    right = training.Tape.attach

    def attach(self, trip, call, y_TH):
        return right(self, trip, call, y_TH * (1 + 2.0**-20))

    patch.setattr(training.Tape, "attach", attach)


def scales_gradients_in_place(patch):
    """The gradient that comes in is scaled where it stands."""
    right = training._Backward.run

    def run(self, dy_TH):
        return right(self, dy_TH.mul_(1.0 + 2.0**-10))

    patch.setattr(training._Backward, "run", run)


def drops_passes(patch):
    """Sums of parameters are those of the last pass."""
    right = training._Backward._pass

    def one_pass(self, kept, came):
        for total in self._sums.values():
            total.zero_()
        return right(self, kept, came)

    patch.setattr(training._Backward, "_pass", one_pass)


def rounds_gradients_at_home(patch):
    """Gradients of rows go through bf16, whatever the layer's dtype."""
    right = RoundTrip.result

    def result(self):
        y_TH = right(self)
        return y_TH.bfloat16().to(y_TH.dtype) if self.spec.of_gradients else y_TH

    patch.setattr(RoundTrip, "result", result)
