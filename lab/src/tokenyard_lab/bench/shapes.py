"""The layers that benchmarks measure on a GPU, and the targets and peers that their figures are compared with.

`CASES` are shapes of models and one rank's share of them, with the formats of their weights and how much work there is.
`bench experts` measures one rank's experts; `bench layer` measures all ranks, of the cases whose sizes are tokens of
each rank.

Targets and recorded peers hold for one H200, and are left out elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenyard.errors import InputError, unknown_name
from tokenyard.experts import ExpertsSpec, activation
from tokenyard.experts.spec import EXACT
from tokenyard.formats import get, weight_format


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer. The default is DeepSeek-V3's."""

    hidden_size: int = 7168
    intermediate_size: int = 2048
    num_experts: int = 256
    top_k: int = 8
    combine_wire: str = "bf16"


@dataclass(frozen=True, kw_only=True)
class Case(Shape):
    """One rank's share of a model's layer, the formats of its weights, and how much work there is."""

    local_experts: int = 32
    weights: tuple[str, ...]
    # Pairs of a row and a local expert; or tokens, if all experts are local or with `tokens_a_rank`.
    sizes: tuple[int, ...]
    # Whether sizes are tokens that each rank brings. A rank's experts then get their share of all ranks' pairs.
    tokens_a_rank: bool = False
    inner: str = EXACT  # the inner format, for weights that allow it
    # By weights, the format in which rows arrive, if it is not the usual one.
    arrives: tuple[tuple[str, str], ...] = ()

    @property
    def all_local(self) -> bool:
        """Whether the rank holds the whole layer."""
        return self.local_experts == self.num_experts

    @property
    def ranks(self) -> int:
        """How many ranks share the layer."""
        return self.num_experts // self.local_experts

    def pairs(self, size: int) -> int:
        """Pairs of a row and a local expert."""
        return size * self.top_k if self.all_local or self.tokens_a_rank else size

    @property
    def counts(self) -> str:
        """The unit of `sizes`, in words."""
        return "tokens" if self.all_local else "tokens a rank" if self.tokens_a_rank else "rows"

    def __str__(self) -> str:
        """The shape, as a table names it."""
        between = "" if self.inner == EXACT else f", {self.inner} between products of such weights"
        return (
            f"H {self.hidden_size}, I {self.intermediate_size}, {self.local_experts} of {self.num_experts} "
            f"experts, K {self.top_k}{between}; sizes are {self.counts}"
        )


# The format in which rows arrive, where it is not bf16.
ARRIVES_AS = {"fp8_block128": "fp8_block128", "mxfp8": "mxfp8"}

_FP8 = "fp8_block128"
_A = Case(weights=("bf16", _FP8, "mxfp8"), sizes=(32, 256, 1024, 8192))
# One rank's share of eight.
_V3 = replace(_A, weights=(_FP8,), sizes=(8, 128, 1024, 8192), tokens_a_rank=True, inner=_FP8)
_FLASH = replace(
    _V3, hidden_size=4096, top_k=6, weights=(_FP8, "mxfp4", "bf16"), arrives=(("mxfp4", "mxfp8"),)
)
CASES: dict[str, Case] = {
    "A": _A,
    "B": Case(local_experts=48, num_experts=384, weights=("mxint4", "nvfp4"), sizes=(8, 64, 512, 4096)),
    "C": Case(
        hidden_size=2880,
        intermediate_size=2880,
        local_experts=128,
        num_experts=128,
        top_k=4,
        weights=("mxfp4",),
        sizes=(16, 128, 1024),
    ),
    "D": replace(_A, weights=(_FP8,), inner=_FP8),  # A, quantized once between the products
    "FLASH": _FLASH,
    "PRO": replace(_FLASH, hidden_size=7168, intermediate_size=3072, local_experts=48, num_experts=384),
    "V3": _V3,
}
MODELS = {"FLASH": "DeepSeek-V4-Flash", "PRO": "DeepSeek-V4-Pro", "V3": "DeepSeek-V3"}

Figures = dict[tuple[str, str], tuple[float | None, ...]]

# µs of one rank's experts on one H200, by the sizes of the case.
TARGETS: Figures = {
    ("A", "bf16"): (425, 650, 680, 1350),
    ("A", "fp8_block128"): (230, 345, 370, 1000),
    ("B", "mxint4"): (58, 230, 350, 820),
    ("C", "mxfp4"): (235, 540, 700),
    ("D", "fp8_block128"): (230, 345, 370, 950),
    ("FLASH", "fp8_block128"): (155, 210, 450, 2650),
    ("FLASH", "mxfp4"): (110, 185, 560, 2950),
    ("FLASH", "bf16"): (280, 385, 630, 4150),
    ("PRO", "fp8_block128"): (425, 830, 1300, 7000),
    ("PRO", "mxfp4"): (268, 580, 1650, 8200),
    ("V3", "fp8_block128"): (300, 400, 950, 6200),
}
# Formats whose target is a multiple of another format's time in the same run.
WITHIN = 1.15
BESIDE = {"mxfp8": "fp8_block128", "nvfp4": "mxint4"}
# The best peer on one H200 that was measured before: two grouped products and the activation, without sorting and sums.
PEERS: Figures = {
    ("A", "bf16"): (417, 639, 668, 1429),
    ("A", "fp8_block128"): (230, 336, 377, 1140),
    ("B", "mxint4"): (65, 270, 436, 1302),
    ("C", "mxfp4"): (271, 622, 1063),
}
# DeepGEMM's fused fp8 layer on eight H200 with links between them: µs of a layer, the exchange included.
LAYER_PEERS: Figures = {
    ("FLASH", "fp8_block128"): (225, None, None, 3269),
    ("PRO", "fp8_block128"): (637, None, None, 7939),
    ("V3", "fp8_block128"): (404, 490, 1222, 7492),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure of a case."""

    case: str
    shape: Case
    weights: str
    size: int  # pairs, or tokens: see `Case.sizes`

    def parameters(self, size: str = "size") -> dict[str, str | int]:
        """The parameters of its record, with the size under the name `size`. Only layers of `CASES` have a case."""
        case = {"case": self.case} if self.case else {}
        return {**case, "weights": self.weights, size: self.size}

    @property
    def rows_format(self) -> str:
        """The format in which rows arrive."""
        return dict(self.shape.arrives).get(self.weights) or ARRIVES_AS.get(self.weights, "bf16")

    @property
    def spec(self) -> ExpertsSpec:
        """One rank's experts."""
        shape = self.shape
        return ExpertsSpec(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_local_experts=shape.local_experts,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            activation=activation("swiglu"),
            weights=self.weights,
            inner=get(shape.inner) if shape.inner in weight_format(self.weights).inner_formats else None,
        )

    def figure_of(self, table: Figures) -> float | None:
        """The figure of this cell in a table, if there is one."""
        figures = table.get((self.case, self.weights))
        return (
            figures[self.shape.sizes.index(self.size)] if figures and self.size in self.shape.sizes else None
        )

    def __str__(self) -> str:
        return f"{self.case + ', ' if self.case else ''}{self.weights}, {self.size} {self.shape.counts}"


def cells_of(shape: Case) -> list[Cell]:
    """The cells of a layer of any shape that is not in `CASES`.

    >>> shape = Case(local_experts=64, weights=("bf16", "fp8_block128"), sizes=(128,), tokens_a_rank=True)
    >>> [str(cell) for cell in cells_of(shape)]
    ['bf16, 128 tokens a rank', 'fp8_block128, 128 tokens a rank']
    """
    return [
        Cell(case="", shape=shape, weights=weights, size=size)
        for weights in shape.weights
        for size in shape.sizes
    ]


def grid(
    cases: Sequence[str] = (), weights: Sequence[str] = (), *, known: Sequence[str] = tuple(CASES)
) -> list[Cell]:
    """The cells of a run: all of them, or those of some cases and formats.

    >>> [str(cell) for cell in grid(["C"])]
    ['C, mxfp4, 16 tokens', 'C, mxfp4, 128 tokens', 'C, mxfp4, 1024 tokens']
    """
    for name in cases:
        if name not in known:
            raise unknown_name("case", name, known)
    formats = list(dict.fromkeys(format for name in known for format in CASES[name].weights))
    for name in weights:
        if name not in formats:
            raise unknown_name("weight format of these cases", name, formats)
    return [
        Cell(case=name, shape=CASES[name], weights=format, size=size)
        for name in known
        if not cases or name in cases
        for format in CASES[name].weights
        if not weights or format in weights
        for size in CASES[name].sizes
    ]


def cases_of(names: str | None) -> list[str]:
    """The cases that an option like `A,C` or `all` names.

    >>> cases_of("a, C"), cases_of("all")
    (['A', 'C'], [])
    """
    if names is None or names.strip().lower() == "all":
        return []
    return [name.strip().upper() for name in names.split(",")]


def check_top_k(top_k: int, num_experts: int) -> None:
    """Raise if a token chooses fewer than one or more than all experts."""
    if not 1 <= top_k <= num_experts:
        raise InputError(
            f"top_k is {top_k}, of {num_experts} experts",
            expected=f"a top_k from 1 to {num_experts}: choices are drawn without repetition",
            fix="choose fewer experts per token, or more experts",
        )


def check_rounds(rounds: int) -> None:
    """Raise if there are too few rounds for a spread."""
    if rounds < 2:
        raise InputError(
            f"rounds is {rounds}", expected="at least 2, to have a spread", fix="pass --rounds 2"
        )
