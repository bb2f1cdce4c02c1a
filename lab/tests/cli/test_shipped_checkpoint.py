"""Commands of the library on the model that ships."""

import pytest

from tests.cli.runner import call, call_json
from tokenyard_lab.shipped import shipped_model


def test_a_megabyte_is_a_million_bytes():
    """As in `eval` and in the benchmarks: 7,077,888 bytes."""
    assert "Experts 7.1 MB, everything else 1.3 MB." in call("inspect", shipped_model()).stdout


# Converted weights are decoded anew for each token, which takes long: few tokens are no right answer.
@pytest.mark.parametrize(
    ("problems", "tokens", "right"), [(1, 8, False), pytest.param(2, 128, True, marks=pytest.mark.long)]
)
def test_the_shipped_model_prints_the_same_text_when_it_was_converted(problems, tokens, right, tmp_path):
    pytest.importorskip("transformers")
    out = tmp_path / "converted"
    call_json("convert", shipped_model(), "--weights", "mxfp8", "--out", out)
    asked = ("run", "--kind", "threads", "--ranks", 1, "--problems", problems, "--max-new-tokens", tokens)
    before, after = (
        call_json(*asked, "--model", folder, exit_code=0 if right else 1)["answers"]
        for folder in (shipped_model(), out)
    )
    assert all(answer["right"] == right and answer["text"] for answer in before)
    assert after == before
