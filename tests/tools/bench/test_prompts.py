"""Prompt files in the forms that are about, and prompts of a wanted length."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afore.core.errors import ConfigError
from afore.tools.bench.prompts import PromptText, read_prompts, tokens_of_length


def test_the_bundled_prompts_say_how_long_their_answers_are() -> None:
    found = read_prompts(None)
    assert len(found) == 32
    assert all(prompt.max_tokens for prompt in found)


def test_each_form_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(
        '{"prompt": "a", "max_new_tokens": 5, "response": "x"}\n\n{"question": "b", "answer": "y"}\n'
        '{"text": "c"}\n{"name": "n", "sat": "d"}\n'
    )
    assert read_prompts(str(path)) == (
        PromptText(text="a", max_tokens=5),
        PromptText(text="b"),
        PromptText(text="c"),
        PromptText(text="d"),
    )


def test_plain_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes(b"first one\r\n\r\n  \nsecond\n")
    assert [prompt.text for prompt in read_prompts(str(path))] == ["first one", "second"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no prompt"),
        ("{\n", "line 1 is not JSON"),
        ('{"prompt": "a"}\n[]\n', "line 2 has no text"),
        ('{"prompt": ""}\n', "line 1 has no text"),
        ('{"prompt": "a", "max_new_tokens": true}\n', "max_new_tokens is True"),
        ('{"prompt": "a", "max_new_tokens": 0}\n', "max_new_tokens is 0"),
    ],
)
def test_broken_files_are_refused_by_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_prompts(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(str(tmp_path / "none.jsonl"))


def test_prompts_are_joined_and_cut_by_hand() -> None:
    assert tokens_of_length([[1, 2, 3], [4, 5]], 2, 0) == (1, 2)
    assert tokens_of_length([[1, 2, 3], [4, 5]], 7, 1) == (4, 5, 1, 2, 3, 4, 5)
    with pytest.raises(ValueError, match="no tokens"):
        tokens_of_length([[], []], 3, 0)


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(0, 99), min_size=1), min_size=1, max_size=5), st.integers(0, 200), st.integers(0, 50)
)
def test_prompts_have_the_wanted_length(pool: list[list[int]], length: int, start: int) -> None:
    found = tokens_of_length(pool, length, start)
    assert len(found) == length
    first = pool[start % len(pool)]
    assert list(found[: len(first)]) == first[:length]
