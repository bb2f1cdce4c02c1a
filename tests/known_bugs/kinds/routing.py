"""Bugs of routing: where a row goes, how often, and what belongs to the caller."""

from dataclasses import replace

import torch

from tests.known_bugs.known_bug import BugKind, ExchangeCheck, KnownBug
from tokenyard.exchange import BatchRoutes, batch, batch_maker
from tokenyard.routing import Placement


def nobody_sent_to_rank_zero(patch):
    right = Placement._single_lookup

    def single_lookup(self, device):
        rank_E, local_E = right(self, device)
        return rank_E.clamp(min=0), local_E.clamp(min=0)  # an id of -1 reads the last entry

    patch.setattr(Placement, "_single_lookup", single_lookup)


def duplicates_sent_twice(patch):
    def rows_out(rank_TK, world):
        goes_WTK = torch.stack([rank_TK == rank for rank in range(world)])
        return goes_WTK.nonzero().unbind(1)[:2]  # a copy per choice

    patch.setattr(batch, "rows_out", rows_out)


def more_tokens_than_the_maximum(patch):
    right = batch_maker.check_batch

    def check_batch(spec, *batch, **options):
        return right(replace(spec, max_tokens=2**30), *batch, **options)

    patch.setattr(batch_maker, "check_batch", check_batch)


def ids_cast_to_a_byte(patch):
    right = BatchRoutes.local_routes

    def local_routes(self):
        ids_NK, weights_NK = right(self)
        return ids_NK.to(torch.int8).int(), weights_NK

    patch.setattr(BatchRoutes, "local_routes", local_routes)


def offset_of_even_shares(patch):
    right = Placement._single_lookup

    def single_lookup(self, device):
        rank_E, _ = right(self, device)
        local_E = torch.arange(len(rank_E)) - rank_E * (self.num_experts // self.world)
        return rank_E, torch.where(rank_E < 0, -1, local_E).int()

    patch.setattr(Placement, "_single_lookup", single_lookup)


def input_changed_in_place(patch):
    right = BatchRoutes.local_routes

    def local_routes(self):
        self.routes.topk_weights_TK[self.routes.topk_ids_TK < 0] = 0.0  # nobody weighs nothing
        return right(self)

    patch.setattr(BatchRoutes, "local_routes", local_routes)


KIND = BugKind(
    name="Where a row goes",
    about="Ids become ranks, and ranks become slots. Each of these shortcuts is right for some batches only.",
    bugs=(
        KnownBug(
            name="Nobody's rows sent to rank 0",
            seen="FlashInfer's one-sided kernels, which do not check for it",
            story="Padding tokens have an id of -1. A kernel that divides it by the experts of a rank, rounding "
            "toward zero, gets rank 0. Every padding token is then sent there: rank 0 is always slow, and "
            "computes on garbage.",
            mutate=nobody_sent_to_rank_zero,
            caught_by=ExchangeCheck(name="nobody_is_not_sent"),
            says="14 rows arrived, and row 0 is token 0 of rank 0; expected 4 rows",
        ),
        KnownBug(
            name="A row with duplicate ids sent twice",
            story="A token that chooses one expert twice, or two experts of one rank, goes to that rank once. "
            "With a copy per choice, each copy is computed with both choices, and both come home.",
            mutate=duplicates_sent_twice,
            caught_by=ExchangeCheck(name="duplicate_choices"),
            says="rows in (source, token) order",
        ),
        KnownBug(
            name="More tokens than the maximum",
            seen="FlashInfer's one-sided kernels, which do not check for it",
            story="The slots of rank 1 follow those of rank 0. A batch that is larger than planned continues in "
            "the slots of the next rank, whose tokens then come home wrong.",
            mutate=more_tokens_than_the_maximum,
            caught_by=ExchangeCheck(name="over_capacity", exchange="two_sided"),
            says="rank 3 announces 5 tokens",
        ),
        KnownBug(
            name="Ids cast to the wrong width",
            story="Ids are cast to 8 bits to save bytes, which is enough for 64 experts. The 129th expert of a "
            "rank then has an id of -128, which means no expert, and its tokens are dropped.",
            mutate=ids_cast_to_a_byte,
            caught_by=ExchangeCheck(name="many_experts"),
            says="-1 where an expert lives elsewhere",
        ),
        KnownBug(
            name="Uneven experts, offset of even shares",
            story="A rank's first expert is number rank · ⌊E / W⌋ only if all ranks hold equally many. With 7 "
            "experts on 2 ranks the second rank begins at 4, not at 3, and its tokens get a neighboring "
            "expert.",
            mutate=offset_of_even_shares,
            caught_by=ExchangeCheck(name="uneven_experts"),
            says="-1 where an expert lives elsewhere",
        ),
        KnownBug(
            name="Input changed in place",
            story="The weight beside an id of -1 may be NaN. Setting it to zero in place changes the caller's "
            "tensor, which a log of router weights, an auxiliary loss, or the next micro-batch reads "
            "again.",
            mutate=input_changed_in_place,
            caught_by=ExchangeCheck(name="input_untouched"),
            says="topk_weights_TK was changed; expected nothing of the caller's to be changed",
        ),
    ),
)
