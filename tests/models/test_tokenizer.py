from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afore.core.errors import CheckpointError
from afore.models.bundle import bundled_model_path, bundled_prompts
from afore.models.tokenizer import Tokenizer

shared = Tokenizer(bundled_model_path())
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=40)


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    return [*pieces, detokenizer.flush()]


@given(texts)
def test_text_comes_back(text: str) -> None:
    assert shared.decode(shared.encode(text)) == text


@given(texts)
def test_streamed_pieces_are_the_text_and_never_half_a_character(text: str) -> None:
    pieces = stream(shared, shared.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300)
@given(st.lists(st.one_of(st.integers(0, 4095), st.integers(3, 258)), max_size=30))
def test_streamed_pieces_of_any_tokens_are_what_decode_says(token_ids: list[int]) -> None:
    """Random tokens make bytes that are no text: what is shown must still be what decoding all at once shows."""
    assert "".join(stream(shared, token_ids)) == shared.decode(token_ids)


def test_a_character_of_several_tokens_appears_when_it_is_whole(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("€🙂")
    assert len(token_ids) > 4, "characters that the vocabulary spells in bytes"
    pieces = stream(tokenizer, token_ids)
    assert [piece for piece in pieces if piece] == ["€", "🙂"]


def test_text_appears_as_it_is_written(tokenizer: Tokenizer) -> None:
    for prompt in bundled_prompts()[:8]:
        token_ids = tokenizer.encode(prompt.prompt)
        pieces = stream(tokenizer, token_ids)
        assert "".join(pieces) == prompt.prompt
        assert sum(piece != "" for piece in pieces) > 0.9 * len(token_ids)
        assert pieces[-1] == ""


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    token_ids = [*tokenizer.encode("one"), 2, *tokenizer.encode(" two")]
    assert "".join(stream(tokenizer, token_ids)) == "one two"
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    assert "".join(detokenizer.push(token) for token in token_ids) == "one<|eos|> two"
    assert tokenizer.eos_id == 2


def test_a_conversation_ends_where_the_assistant_is_to_answer(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Why?"},
    ]
    assert tokenizer.render_chat(messages) == "<|bos|>User: Hello\nAssistant: Hi\nUser: Why?\nAssistant:"
    token_ids = tokenizer.encode_chat(messages)
    assert token_ids[0] == 1
    assert 1 not in token_ids[1:]


def test_messages_that_the_template_refuses_are_a_value_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    shutil.copy(bundled_model_path() / "tokenizer.json", tmp_path)
    shutil.copy(bundled_model_path() / "tokenizer_config.json", tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(tmp_path).encode_chat([{"role": "user", "content": "x"}])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        Tokenizer(tmp_path).encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("content", [None, "", "{}", "not json"])
def test_missing_and_broken_tokenizers_are_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    with pytest.raises(CheckpointError) as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
