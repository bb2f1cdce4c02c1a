"""Questions from a file, and what counts as a right answer."""

import pytest

from tokenyard.errors import InputError
from tokenyard_lab.evaluation.questions import Question, is_right, read_questions


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"prompt": "1 + 1?", "answer": 2}\n\n{"prompt": "Capital of France?", "answer": "Paris"}\n'
    )
    assert read_questions(file) == [Question("1 + 1?", "2"), Question("Capital of France?", "Paris")]
    assert len(read_questions(file, 1)) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no question"),
        ("{}", "line 1"),
        ('{"prompt": "a", "answer": "b"}\n["x"]', "line 2"),
        ('{"prompt": "", "answer": "b"}', "not empty"),
        ('{"prompt": " ", "answer": "b"}', "not empty"),
        ('{"prompt": "a", "answer": ["b"]}', "text or a number"),
        ("not json", "line 1"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, content, message):
    file = tmp_path / "mine.jsonl"
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        read_questions(file)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("text", "wanted", "right"),
    [
        ("3 + 4 : 3 4 7 = 7 ; answer 7", "7", True),
        ("answer 1 2", "12", True),
        ("answer 12", "1", False),
        ("answer 4 … no: answer 5", "5", True),
        ("answer 4 … no: answer 5", "4", False),
        ("so we get\n#### 42", "42", True),
        ("The answer: Paris", "paris", True),
        ("Paris", "paris", True),
        ("Paris, of course", "paris", False),
        ("", "7", False),
    ],
)
def test_exact_match(text, wanted, right):
    assert is_right(text, wanted) is right
