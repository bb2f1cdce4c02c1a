"""The shipped model: small, right, and its experts matter, so that what is wired wrong shows in its answers."""

import copy
import json

import pytest
import torch

pytest.importorskip("transformers")

from tokenyard.exchange import EXCHANGES, Pending, ResultsAtHome, TwoSidedTransport
from tokenyard_lab.evaluation.cells import PROBES
from tokenyard_lab.evaluation.decoding import answer, pad_left
from tokenyard_lab.evaluation.models import load_language, load_whole
from tokenyard_lab.evaluation.questions import Question, held_out_questions, is_right
from tokenyard_lab.evaluation.ranks import StartedRanks
from tokenyard_lab.evaluation.table import Evaluation
from tokenyard_lab.shipped import shipped_model
from tokenyard_lab.training.problems import held_out
from tokenyard_lab.training.vocabulary import tokenizer_config, tokenizer_json

CPU = torch.device("cpu")
QUESTIONS = held_out_questions(40)
# Problems of two steps have short solutions: a model that finds no end is stopped early.
SHORT = [Question(p.question, str(p.answer)) for p in held_out(100) if p.steps == 2][:24]
MOST = 56


@pytest.fixture(scope="module")
def model():
    return load_whole(shipped_model(), CPU)


@pytest.fixture(scope="module")
def language():
    return load_language(shipped_model())


def share_right(model, language, questions, most):
    prompts = language.encode([question.prompt for question in questions])
    written = answer(model, *pad_left(prompts, language.pad, CPU), end_ids=language.end_ids(model), most=most)
    texts = map(language.text, written)
    return sum(map(is_right, texts, (question.answer for question in questions))) / len(questions)


def with_experts_times(model, factor):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name, value in changed.named_parameters():
            if name.endswith("experts.down_proj"):
                value.mul_(factor)
    return changed


def test_its_size_and_shape():
    files = list(shipped_model().iterdir())
    assert sum(file.stat().st_size for file in files) <= 12 * 1000**2
    config = json.loads((shipped_model() / "config.json").read_text())
    assert config["hidden_size"] % 256 != 0
    assert config["num_experts"] >= 16
    assert config["num_experts_per_tok"] == 4


def test_its_tokenizer_is_the_one_that_the_package_writes():
    for name, content in {
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": tokenizer_config(),
    }.items():
        assert json.loads((shipped_model() / name).read_text()) == content


def test_it_solves_problems_that_it_has_never_seen(model, language):
    assert share_right(model, language, QUESTIONS, most=128) >= 0.95


def test_without_its_experts_it_solves_next_to_nothing(model, language):
    assert share_right(model, language, SHORT, MOST) >= 0.95
    assert share_right(with_experts_times(model, 0.0), language, SHORT, MOST) < 0.2


class ReducesAgain(TwoSidedTransport):
    """#41382: the rows have been summed over the ranks, and are summed over the ranks once more.

    Ranks hold different batches, so a token gets what the others' tokens in the same place have come to.
    """

    name = "reduces_again"

    def send_back(self, results):
        home = super().send_back(results)
        return Pending(lambda: SummedAgain(home.wait(), self.group))


class SummedAgain(ResultsAtHome):
    """Sums the sums of all ranks, each time that results are summed."""

    def __init__(self, home, group):
        self.home, self.group = home, group

    def sum_into(self, out_TH, add):
        y_TH = self.home.sum_into(out_TH, add)
        counts = self.group.gather_json(y_TH.shape[0])
        gathered = self.group.all_gather_rows(y_TH.contiguous().view(torch.uint8), counts, phase="once more")
        summed = torch.zeros(max(counts), y_TH.shape[1])
        for rows in gathered.view(y_TH.dtype).split(counts):
            summed[: len(rows)] += rows
        return y_TH.copy_(summed[: y_TH.shape[0]])

    def by_rank(self):
        return self.home.by_rank()


@pytest.mark.long  # tests/reports/test_41382.py has the fault; answers get worse in the test above, too
def test_a_second_reduction_costs_more_than_ten_points_and_the_evaluation_says_so(monkeypatch):
    """Injected behind the back of the API. No error, no NaN: only the answers are worse."""
    monkeypatch.setitem(EXCHANGES, "reduces_again", ReducesAgain)
    evaluation = Evaluation(
        ranks=StartedRanks(4, "threads"),
        folder=shipped_model(),
        questions=SHORT[:16],
        most=MOST,
        exchanges=["two_sided", "reduces_again"],
        wires=["bf16"],
        weights=["bf16"],
    )
    assert len(evaluation.questions) <= PROBES  # all answered token by token
    whole, right, wrong = evaluation.rows()
    assert whole.accuracy.value >= 0.95
    assert right.difference.value == 0
    assert wrong.same_bits_as is None
    assert wrong.difference.value <= -0.10
    assert wrong.difference.high < -0.05
