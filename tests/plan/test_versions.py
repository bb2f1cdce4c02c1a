"""Ranks of different versions: told apart before the first token, on every rank, by what they speak."""

import tokenyard as ty
from tests.models import on_ranks, raised, spec
from tokenyard.errors import PlanMismatch
from tokenyard.group import ThreadGroup
from tokenyard.routing import Placement, SoftmaxRouter


class Older(ThreadGroup):
    """What this rank reports is of another version."""

    says = {}  # noqa: RUF012 (each test has its own)

    def gather_json(self, value, *, phase="gather_json"):
        if isinstance(value, dict) and "fields" in value and self.rank == 1:
            value = self.says(value)
        return super().gather_json(value, phase=phase)


def mismatch(group, says):
    group.__class__, Older.says = Older, staticmethod(says)
    error = raised(ty.plan, [spec()], group)
    assert isinstance(error, PlanMismatch), error
    return list(error.differences)[:2], error.fix


def test_another_protocol_is_told_first_with_the_versions():
    def says(report):
        return {**report, "version": "99.0", "fields": {**report["fields"], "protocol": 99}}

    for names, fix in on_ranks(2, mismatch, says):
        assert names == ["version", "protocol"]
        assert fix == "run one version of tokenyard on all ranks"


def test_a_report_of_another_shape_is_a_mismatch_like_any_other():
    for names, _ in on_ranks(2, mismatch, lambda report: {"hash": "0a1b"}):
        assert names == ["version", "plans made"]


def more_layers(group):
    layers = [spec("moe"), spec("head")] if group.rank == 1 else [spec("moe")]
    return next(iter(raised(ty.plan, layers, group).differences))


def test_how_many_layers_there_are_is_told_before_the_fields_of_one():
    assert on_ranks(2, more_layers) == ["number of layers"] * 2


def test_another_version_of_one_protocol_is_refused():
    for names, fix in on_ranks(2, mismatch, lambda report: {**report, "version": "99.0"}):
        assert names == ["version"]
        assert fix == "run one version of tokenyard on all ranks"


def another_torch(group):
    group.__class__ = Older
    Older.says = staticmethod(lambda report: {**report, "torch": "1.0"})
    return ty.plan([spec()], group).stats().keys()


def test_another_torch_is_a_warning_on_every_rank(caplog):
    assert on_ranks(2, another_torch) == [{"moe"}, {"moe"}]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert all("rank 1 has torch 1.0" in warning for warning in warnings)


def test_a_layer_is_compared_by_names_and_plain_values():
    router = SoftmaxRouter(top_k=2, renormalize=True)
    plain, other = (
        ty.draft([layer], 2, exchange="two_sided").wirings[0].fields()
        for layer in (
            spec(),
            spec(
                wire="mxfp8",
                combine_wire="fp8_block128",
                inner="fp8_block128",
                weights="fp8_block128",
                router=router,
            ),
        )
    )
    names = (
        "dtype",
        "max_tokens",
        "wire",
        "combine_wire",
        "expert_rows",
        "inner",
        "router",
        "routed_scaling",
    )
    assert [plain[name] for name in names] == ["bfloat16", 16, "bf16", "bf16", "None", "exact", None, 1.0]
    assert [other[name] for name in names[2:]] == [
        "mxfp8",
        "fp8_block128",
        "None",
        "fp8_block128",
        router.fields(),
        1.0,
    ]
    assert plain["placement"] == Placement.contiguous(5, 2).fields()
    assert plain["experts"] == "grouped (GroupedExperts)"
    assert plain["duties"]["QUANTIZE"] == "NOBODY"
    assert other["duties"]["QUANTIZE"] == "SENDER"
