"""The exact bytes of tokens, and what a codec refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cb_ray.errors import InvalidRequestError, UnsupportedModelError
from cb_ray.text.codec import TextCodec
from tests.text.tokenizers_made import byte_fallback, byte_level


@given(ids=st.lists(st.integers(0, byte_level().size - 1), max_size=20))
def test_bytes_of_tokens_spell_the_text(ids: list[int]) -> None:
    """The bytes of the tokens, one after the other, are the bytes of the text, also where a token is a piece of a character."""
    codec = byte_level()
    spelled = b"".join(map(codec.token_bytes, ids))
    assert spelled.decode(errors="replace") == codec.decode(ids)


@pytest.mark.parametrize("text", ["hell or", "🎉", "aé a"])
def test_bytes_of_tokens_with_underlines_and_byte_tokens(text: str) -> None:
    """A SentencePiece-like token has its space, and `<0xF0>` is the byte itself."""
    codec = byte_fallback()
    ids = codec.encode(text, add_special_tokens=False)
    assert b"".join(map(codec.token_bytes, ids)) == f" {text}".encode()


def test_token_text_of_a_piece_of_a_character() -> None:
    """A token that is no whole character has U+FFFD for its text, and its bytes tell what it is."""
    codec = byte_level(258)
    first = codec.encode("🎉")[0]
    assert (codec.token_text(first), codec.token_bytes(first)) == ("\ufffd", b"\xf0")


def test_a_token_of_no_vocabulary_has_no_bytes() -> None:
    """A model's vocabulary may be padded beyond its tokenizer's; such a token is empty, not an error."""
    assert byte_level().token_bytes(10**6) == b""


def test_special_tokens_are_added_once_and_on_request() -> None:
    """The tokenizer's own beginning-of-sequence comes with text prompts and stays away from rendered chats."""
    codec = byte_fallback()
    assert codec.encode("a")[0] == 1
    assert 1 not in codec.encode("a", add_special_tokens=False)


def test_half_a_surrogate_pair_is_refused() -> None:
    """Half an emoji, as JavaScript cuts them, is the client's error and not a TypeError out of the tokenizer."""
    with pytest.raises(InvalidRequestError, match="surrogate"):
        byte_level().encode("a\ud83c")


def test_the_bound_on_tokens_holds_for_the_longest_tokens() -> None:
    """A text is refused for its length unread only if it could not fit even if every token were the longest one."""
    codec = byte_level()
    longest = max(codec.backend.get_vocab(), key=len)
    text = codec.decode([codec.backend.get_vocab()[longest]]) * 50
    assert codec.at_least(len(text)) <= len(codec.encode(text))
    assert codec.at_least(10**6) > 0


def test_a_tokenizer_without_rust_is_refused_by_name() -> None:
    """A slow tokenizer cannot stream; the error names the model and what to do."""
    with pytest.raises(UnsupportedModelError, match=r"my-model .*tokenizer\.json"):
        TextCodec(object(), "my-model")  # type: ignore[arg-type]
