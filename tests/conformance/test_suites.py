"""The suites pass for everything registered, and catch every mutant by the check that is named for its fault."""

import itertools

import pytest
import torch

from tests.conformance import mutants
from tests.exchange.interpreter import install, only_without_gpu
from tokenyard.conformance.suites import (
    EXCHANGE_CHECKS,
    EXCHANGE_GRADIENT_CHECKS,
    EXPERTS_CHECKS,
    EXPERTS_GRADIENT_CHECKS,
    FORMAT_CHECKS,
    assert_passed,
    check_exchange,
    check_experts,
    check_format,
)
from tokenyard.errors import InputError, UnknownName
from tokenyard.exchange import EXCHANGES
from tokenyard.experts import EXPERTS
from tokenyard.formats import FORMATS

SHORT = [("hierarchical", "threads"), ("one_sided", "processes")]
SPELLINGS = ["mxfp8(alignment=256)", "nvfp4(global_scale=8.0)", "fp8_block128(power_of_two_scales=True)"]


# tests/cli/test_cli_check.py runs a few checks of every exchange.
@pytest.mark.parametrize(
    ("exchange", "ranks"),
    [
        pytest.param(*each, marks=() if each in SHORT else pytest.mark.long)
        for each in itertools.product(EXCHANGES, ["threads", "processes"])
    ],
)
def test_every_exchange_passes(exchange, ranks):
    results = check_exchange(exchange, ranks=ranks, world={"threads": 4, "processes": 3}[ranks], rounds=20)
    trains = EXCHANGES[exchange].trains_on(torch.device("cpu")) is None
    assert [result.check for result in results] == [
        check for check in EXCHANGE_CHECKS if trains or check not in EXCHANGE_GRADIENT_CHECKS
    ]
    assert_passed(results)


@pytest.mark.parametrize(
    "exchange",
    ["local", "one_sided", *(pytest.param(n, marks=pytest.mark.long) for n in EXCHANGES if n != "one_sided")],
)
def test_every_exchange_passes_on_one_rank(exchange):
    assert_passed(check_exchange(exchange, world=1, rounds=5))


@pytest.mark.parametrize("format", [*FORMATS, *SPELLINGS])
def test_every_format_passes(format):
    results = check_format(format)
    assert [result.check for result in results] == list(FORMAT_CHECKS)
    assert_passed(results)


@pytest.mark.parametrize("experts", [name for name in EXPERTS if name != "fused"])
def test_every_experts_class_passes(experts):
    results = check_experts(experts)
    assert [one.check for one in results] == [
        check for check in EXPERTS_CHECKS if EXPERTS[experts].trains or check not in EXPERTS_GRADIENT_CHECKS
    ]
    assert_passed(results)


# Where Triton interprets, a call takes a second: the checks that draw many specs are left to tests/gpu, and the shapes
# they draw to tests/experts/test_fused.py.
@only_without_gpu
def test_fused_experts_pass_under_the_interpreter():
    install()
    many = ("finalizing_agrees", "within_the_bound", "rows_are_quantized_once")
    many += ("batches_are_independent", "objects_are_independent", "all_data_within_the_bound")
    many += ("every_number_of_rows", "many_rows_and_experts", "every_format_within_the_bound")
    many += (
        "invariant_as_declared",
        "moved_weights_are_used",
        "strides_as_declared",
        "results_have_their_dtype",
    )
    few = [name for name in EXPERTS_CHECKS if name not in many]
    assert_passed(check_experts("fused", only=few))


def test_experts_that_do_not_run_somewhere_are_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InputError, match=r"experts=fused: its kernels need a GPU, and rows are on cpu"):
        check_experts("fused")


def test_a_device_may_be_given():
    assert_passed(check_exchange("two_sided", world=2, only=["bitwise_movement"], device="cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_gpu_that_is_not_there_is_no_finding_of_the_exchange(ranks):
    with pytest.raises(InputError, match=r"device is 'cuda', .* sees no GPU"):
        check_exchange("two_sided", world=2, ranks=ranks, device="cuda")


@pytest.mark.long  # tests/conformance/test_check_page.py runs a few checks of two classes of one's own
def test_a_class_of_ones_own_passes():
    assert_passed(check_exchange(mutants.changing.Renamed, world=2, rounds=5))


@pytest.mark.parametrize(
    ("exchange", "check", "part"),
    [
        (mutants.rows.SwapsRows, "source_and_token_order", "row 0 is token 1 of rank 0"),
        (
            mutants.rows.FlipsABit,
            "bitwise_movement",
            "arrived with other bits: [",
        ),
        (mutants.rows.GlobalIds, "bitwise_movement", "-1 where an expert lives elsewhere"),
        (mutants.rows.OneCopyPerExpert, "one_copy_per_rank", "rows in (source, token) order"),
        (mutants.rows.NobodyToRankZero, "nobody_is_not_sent", "rows arrived"),
        (mutants.rows.WritesIntoRows, "input_untouched", "topk_weights_TK was changed"),
        (mutants.rows.ReducesTwice, "bitwise_movement", "came home as"),
        (mutants.rows.AlwaysFloat32, "output_dtype", "gave float32"),
        (mutants.rows.ReusesOutput, "output_is_kept", "kept over three rounds gave other bits"),
        (mutants.rows.DriftsLater, "many_rounds", "round 31 brought other results than were sent in it"),
        (mutants.remembering.StaleRows, "many_rounds", "brought other rows (data) than were sent in it"),
        (
            mutants.remembering.StaleRows,
            "plans_in_turns",
            "beside another plan gave other bits than the twin",
        ),
        (mutants.remembering.StaleWeights, "many_rounds", "brought other weights than were sent in it"),
        (
            mutants.remembering.StalePayloads,
            "many_rounds",
            "brought other payloads (where) than were sent in it",
        ),
        (mutants.remembering.StaleResults, "many_rounds", "brought other results than were sent in it"),
        (mutants.remembering.StaleResults, "late_ranks", "in round 2, gave other bits than the twin"),
        (mutants.remembering.SendsWhatWasLeft, "bad_input_reaches_all", "layer 'moe'"),
        (mutants.remembering.RoundStandsStill, "rounds_are_counted", "have the rounds [1, 1, 1, 1, 1]"),
        (mutants.remembering.RoundStandsStill, "many_rounds", "dispatch 2 has the round 1; expected 2"),
        (mutants.remembering.FailedRoundsDoNotCount, "rounds_are_counted", "have the rounds [1, 2, 3, 4, 5]"),
        (mutants.remembering.PlacesByShape, "alike_layers", "layer 'second' beside one of the same sizes"),
        (
            mutants.remembering.PlacesByName,
            "plans_in_turns",
            "beside another plan gave other bits than the twin",
        ),
        (mutants.remembering.LayersByNumber, "growing_plans", "after the plan has forgotten its first layer"),
        (mutants.remembering.OneBufferForTheRows, "several_in_flight", "dispatch 1 of 2 in flight"),
        (
            mutants.remembering.RowsComeHomeInOneBuffer,
            "unreduced_rows",
            "the sum of unreduced rows gave other bits",
        ),
        (mutants.remembering.KeepsTheResidual, "out_and_add", "combine(out=y, add=(y,)) gave other bits"),
        (
            mutants.remembering.KeepsTheWorkspace,
            "closed_plans_make_room",
            "shared buffers of 5 closed plans are still there",
        ),
        (mutants.declarations.CountsNoBytes, "bytes_are_counted", "`dispatch_bytes` for rank 0 is 0"),
        (mutants.declarations.CountsNoBytesOneSided, "bytes_are_counted", "`dispatch_bytes` for rank 0 is 0"),
        (mutants.declarations.CountsEveryToken, "bytes_are_counted", "as went through the group"),
        (
            mutants.declarations.PlansHalf,
            "memory_as_planned",
            "the plan says a dispatch region of 19200 bytes",
        ),
        (mutants.declarations.PlansNothingOneSided, "memory_as_planned", "the plan says a workspace of"),
        (
            mutants.declarations.SaysItCarriesLogits,
            "logits_as_declared",
            "`carries_logits` is True, and a dispatch of logits",
        ),
        (
            mutants.declarations.SaysItWatches,
            "paranoid_as_declared",
            "a received row that was changed: no error",
        ),
        (mutants.losses.GoesOn, "late_in_dispatch", "after PeerLost gave other bits than the twin"),
        (mutants.losses.GoesOn, "late_in_combine", "after PeerLost gave other bits than the twin"),
        (mutants.losses.IsNotBrokenForLong, "late_in_dispatch", "a call of a layer after PeerLost: PeerLost"),
        (mutants.uses.FlipsAheadOnly, "all_data_started", "started and finished, of a batch with"),
        (mutants.uses.OneBufferForTwo, "several_in_flight", "dispatch 1 of 2 in flight"),
        (mutants.uses.FirstPlacement, "all_data_after_moves", "after its experts have moved"),
        (mutants.uses.HidesNanOfRows, "all_data_moves", "arrived with other bits"),
        (mutants.uses.HidesNanOfResults, "all_data_in_calls", "of a batch with NaN and Inf, gave other bits"),
        (mutants.uses.SharesScales, "all_data_moves", "rows (scales) of token"),
        (
            mutants.uses.ZeroesAfterIdleCalls,
            "all_data_between_idle_calls",
            "before and after calls without rows",
        ),
        (mutants.uses.LosesTheSignOfZeros, "all_data_moves", "arrived with other bits"),
        (mutants.uses.LeaksPlans, "plans_leave_nothing", "5 closed plans keep"),
        (mutants.uses.KeepsAFailure, "all_data_after_errors", "after a call that failed"),
        (mutants.uses.WrongFromRound100, "thousands_of_rounds", "round 100 gave"),
        (mutants.uses.RaisesLater, "errors_come_in_their_phase", "an error in dispatch: "),
        (mutants.uses.CountsIn16Bits, "many_rows", "66,000 rows"),
        (mutants.uses.SharesScratch, "plans_under_way", "a batch beside one of another plan"),
        (mutants.uses.OddRowsOnly, "all_data_moves", "arrived with other bits"),
        (mutants.uses.CopiesChoices, "all_data_by_choices", 'with sum="choices", of a batch with'),
        (mutants.uses.ReadsRowsLate, "all_data_started", "started and finished, of a batch with"),
        (mutants.uses.RoundsWeights, "bitwise_movement", "weights of token"),
        (mutants.uses.TakesAbsoluteWeights, "all_data_moves", "weights of token"),
        (mutants.uses.DropsTheLastOfAFullBatch, "all_data_moves", "ids of token"),
        (mutants.uses.SumsBackwards, "all_data_in_calls", "gave other bits"),
        (mutants.uses.AddsOnlyTwoTerms, "terms_as_declared", "a combine that adds 3 tensors"),
        (mutants.uses.CountsTwice, "load_is_counted", "`plan.load()` is"),
        (mutants.uses.LeaksRounds, "rounds_leave_nothing", "30 rounds keep"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_wrong_exchange_is_caught(exchange, check, part):
    (result,) = check_exchange(exchange, world=3, rounds=110, only=[check])
    assert part in str(result.finding)


@pytest.mark.parametrize(
    ("mutate", "check", "part"),
    [
        (
            mutants.exchanges.takes_old_handles,
            "stale_handles",
            "a round trip combined twice: no error; expected HandleError",
        ),
        (mutants.exchanges.no_limit, "over_capacity", "5 tokens of at most 4"),
        (mutants.exchanges.counts_once, "counters_are_right", "`rounds` of layer 'first' is 1; expected 2"),
        (mutants.exchanges.ignores_the_bound, "rows_bounded_as_declared", "rows came to a rank in a pass"),
        (mutants.exchanges.forgets_later_passes, "rows_bounded_as_declared", "gave other bits"),
        (mutants.exchanges.never_waits, "counters_are_right", "`wait_s` of two dispatches"),
        (mutants.exchanges.drops_uncounted, "lost_experts_are_counted", "`dropped` is 0; expected"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mutant_of_the_exchange_itself_is_caught(mutate, check, part, monkeypatch):
    mutate(monkeypatch)
    (result,) = check_exchange("two_sided", world=3, rounds=40, only=[check])
    assert part in str(result.finding)


def test_what_is_wrong_from_round_4096_on_is_caught():
    wrong = mutants.uses.WrongFromRound4096
    (result,) = check_exchange(wrong, world=1, only=["thousands_of_rounds"])
    assert "round 4096 gave" in str(result.finding)


def test_a_barrier_over_the_whole_world_is_caught():
    only = ["one_hot_expert", "groups_side_by_side"]  # the first of which has the world in it
    _, result = check_exchange(mutants.remembering.WaitsForTheWorld, world=4, only=only, deadline=2.0)
    assert "beside another group that makes one" in str(result.finding)


@pytest.mark.parametrize("exchange", [mutants.losses.GoesOn, mutants.losses.IsNotBrokenForLong])
def test_going_on_after_a_process_was_stopped_is_caught(exchange):
    (result,) = check_exchange(exchange, ranks="processes", world=2, only=["stopped_and_continued"])
    assert "after PeerLost" in str(result.finding)


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_rank_that_keeps_its_error_to_itself_breaks_one_check_and_no_other(ranks):
    only = ["one_hot_expert", "over_capacity", "drifted_ranks", "closed_plans_make_room"]
    results = check_exchange(mutants.rows.ForgetsToTell, ranks=ranks, world=2, only=only, deadline=10.0)
    assert [result.check for result in results if not result.passed] == ["over_capacity"]


@pytest.mark.parametrize(
    ("format", "check", "part"),
    [
        (mutants.formats.OneScaleForAll, "rows_are_independent", "has another 'data' in a batch than alone"),
        (
            mutants.formats.LiesAboutWidth,
            "payloads_as_declared",
            "payload 'data' of 0 rows of width 1 is bfloat16[0, 1]; expected bfloat16[0, 9]",
        ),
        (
            mutants.formats.KeepsThePad,
            "true_width_comes_back",
            "decode to bfloat16[0, 32]; expected bfloat16[0, 1]",
        ),
        (mutants.formats.ClampsInPlace, "input_untouched", "the bfloat16 input was changed by encode"),
        (mutants.formats.NotAsNear, "decoded_rows_are_near", "at most 0.001, as declared"),
        (mutants.formats.HidesNan, "nan_stays_in_its_row", "a row with NaN decodes to numbers"),
        (mutants.formats.RemembersTheLargest, "codes_repeat", "encoding twice gave two different 'data'"),
        (mutants.formats.SwizzlesNothing, "scale_layouts_as_declared", "swizzled"),
        (mutants.numbers.OddWidths, "every_width", "rows of width 3 came back with other bits"),
        (mutants.numbers.ManyRows, "every_number_of_rows", "row 64 of"),
        (mutants.numbers.HalfOfFloat16, "every_dtype", "decoding to float16 differs from rounding"),
        (mutants.numbers.NoSmallNumbers, "every_size_of_numbers", "numbers of 2^-4 are off by"),
        (mutants.numbers.LosesSigns, "every_kind_of_numbers", "came back with other bits"),
        (mutants.numbers.ReusesCodes, "codes_are_kept", "payload 'data' was changed by a later batch"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_wrong_format_is_caught(format, check, part):
    (result,) = check_format(format, only=[check])
    assert part in str(result.finding)


@pytest.mark.parametrize(
    ("experts", "check", "part"),
    [
        (mutants.experts.ReturnsATuple, "one_type_returned", "returned a tuple of 2; expected ExpertRows"),
        (mutants.experts.WeighsTwice, "within_the_bound", "beyond the bound for"),
        (mutants.experts.FinalizesOtherwise, "finalizing_agrees", "finalize=True and finalize=False differ"),
        (mutants.experts.ComputesForNobody, "rows_for_nobody_are_zero", "row 3, for no expert, is"),
        (mutants.experts.ClampsNan, "nan_stays_in_its_row", "a row of NaN gave numbers with swiglu_clamped"),
        (
            mutants.experts.DropsDuplicates,
            "duplicate_choices_count_twice",
            "where all choices name one expert",
        ),
        (mutants.experts.NormalizesWeights, "nothing_is_changed", " was changed"),
        (mutants.experts.HoldsOthers, "nothing_is_changed", "do not hold what they were given as w2"),
        (mutants.experts.LoadsElsewhere, "load_is_in_place", "load_ put another tensor in the place of"),
        (mutants.experts.CachesWeights, "load_is_in_place", "after load_"),
        (
            mutants.experts.ReusesItsBuffer,
            "results_are_kept",
            "a result was changed by a later call of the same experts",
        ),
        (
            mutants.experts.SharesItsBuffer,
            "results_are_kept",
            "a result was changed by a later call of other experts",
        ),
        (mutants.experts.SortsOnce, "batches_are_independent", ", in batch 2 of the same experts"),
        (mutants.experts.SharesItsWeights, "objects_are_independent", "beside others with other weights"),
        (mutants.experts.DeclaresTooMuch, "formats_as_declared", "`weight_formats` has 'mxfp4'"),
        (mutants.numbers.KeepsCopies, "moved_weights_are_used", "after experts have moved"),
        (
            mutants.numbers.DependsOnTheNumberOfRows,
            "invariant_as_declared",
            "rows have other bits in a batch of 1",
        ),
        (mutants.numbers.DependsOnThePlace, "invariant_as_declared", "rows have other bits in a batch of"),
        (mutants.numbers.Clamps, "all_data_within_the_bound", "rows with large numbers"),
        (mutants.numbers.NoNegativeWeights, "all_data_within_the_bound", "beyond the bound for"),
        (mutants.numbers.NoNegativeWeights, "every_format_within_the_bound", "beyond the bound for"),
        (mutants.numbers.IgnoresSlots, "rows_in_slots", "rows in slots gave other bits"),
        (mutants.numbers.PlacesInOrder, "rows_in_slots", "results that were placed have other bits"),
        (mutants.numbers.CountsNoDuties, "duties_as_declared", "was recorded for"),
        (mutants.numbers.DrawsNumbers, "nothing_global_is_changed", "drew random numbers"),
        (mutants.numbers.FewExperts, "many_rows_and_experts", "600 rows and 300 experts"),
        (mutants.numbers.LosesTheLastOfATile, "every_number_of_rows", "for 16 rows"),
        (mutants.numbers.MisreadsStrides, "strides_as_declared", "adopted weights with strides"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_wrong_experts_are_caught(experts, check, part):
    (result,) = check_experts(experts, only=[check])
    assert part in str(result.finding)


def test_findings_become_one_error():
    with pytest.raises(AssertionError, match=r"nan_stays_in_its_row: a row with NaN"):
        assert_passed(check_format(mutants.formats.HidesNan))


def test_an_unknown_check_is_named():
    with pytest.raises(UnknownName, match="did you mean 'many_rounds'"):
        check_exchange("two_sided", only=["many_round"])


def test_checks_are_found_by_what_they_take():
    """A check whose parameters are not annotated would not be run."""
    assert [len(checks) for checks in (EXCHANGE_CHECKS, FORMAT_CHECKS, EXPERTS_CHECKS)] == [87, 17, 36]
