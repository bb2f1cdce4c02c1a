"""Greedy answers are those of Transformers, whatever is padded, ended, or drafted."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tests.integrations.transformers_models import tiny_model  # noqa: E402
from tokenyard_lab.evaluation.decoding import answer, answer_from_drafts, pad_left, read  # noqa: E402

CPU = torch.device("cpu")
MOST = 14


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3_moe")


@pytest.fixture(scope="module")
def prompts(model):
    draw = torch.Generator().manual_seed(0)
    size = model.config.vocab_size
    return [torch.randint(2, size, (length,), generator=draw).tolist() for length in (3, 9, 5, 1, 7, 12)]


@pytest.fixture(scope="module")
def end(model, prompts):
    """A token that the model writes somewhere on the way, so that answers end at different places."""
    written = alone(model, prompts[0], end_ids=[])
    return written[len(written) // 2]


def alone(model, prompt, end_ids):
    """What Transformers itself writes after one prompt."""
    ids = torch.tensor([prompt])
    options = {"eos_token_id": end_ids} if end_ids else {"eos_token_id": None}
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MOST,
        do_sample=False,
        pad_token_id=0,
        **options,
    )[0, len(prompt) :].tolist()
    for place, token in enumerate(found):
        if token in end_ids:
            return found[:place]
    return found


def test_a_batch_answers_as_each_prompt_alone(model, prompts, end):
    heard = {}
    found = answer(
        model,
        *pad_left(prompts, 0, CPU),
        end_ids=[end],
        most=MOST,
        on_token=lambda row, token: heard.setdefault(row, []).append(token),
    )
    assert found == [alone(model, prompt, [end]) for prompt in prompts]
    assert len({len(written) for written in found}) > 1  # rows really ended at different places
    assert [heard.get(row, []) for row in range(len(prompts))] == found


@pytest.mark.parametrize("spoil", ["nothing", "first", "middle", "short", "long", "all"])
def test_drafts_do_not_matter(model, prompts, end, spoil):
    right = [alone(model, prompt, [end]) for prompt in prompts]
    drafts = [list(written) for written in right]
    for draft in drafts:
        if spoil == "first" and draft:
            draft[0] = (draft[0] + 1) % model.config.vocab_size
        elif spoil == "middle" and draft:
            draft[len(draft) // 2] = (draft[len(draft) // 2] + 1) % model.config.vocab_size
        elif spoil == "short":
            del draft[len(draft) // 2 :]
        elif spoil == "long":
            draft += [end, 3, 4]
        elif spoil == "all":
            draft[:] = [5] * 6
    found = answer_from_drafts(model, prompts, drafts, end_ids=[end], most=MOST, pad=0, device=CPU)
    assert found == right


def test_reading_gives_the_logits_of_every_token(model, prompts):
    texts = [[7, 8, 9], [4], [1, 2], [], [3, 3, 3, 3], [6]]
    for prompt, text, logits in zip(prompts, texts, read(model, prompts, texts, 0, CPU), strict=True):
        whole = model(torch.tensor([[*prompt, *text]])).logits[0]
        torch.testing.assert_close(logits, whole[len(prompt) - 1 :], rtol=1e-4, atol=1e-4)
