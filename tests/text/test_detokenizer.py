"""Text comes out whole, in time and only once: against decoding everything at once, and against a slow search for stop strings."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cb_ray.messages import RequestStatus, TokenChunk
from cb_ray.text.detokenizer import REPLACEMENT, Detokenizer, StopStrings, TextStream
from tests.text.tokenizers_made import byte_fallback, byte_level


def token_ids(codec, max_size=40):
    return st.lists(st.integers(0, codec.size - 1), max_size=max_size)


@given(ids=token_ids(byte_level()), skip=st.booleans())
@example(ids=[131, 3, 0, 3], skip=True)
def test_pieces_add_up_to_the_whole(ids: list[int], skip: bool) -> None:
    """Whatever a model emits, valid UTF-8 or not, the pieces and the rest are what decoding all tokens at once gives."""
    codec = byte_level()
    detokenizer = Detokenizer(codec, skip_special_tokens=skip)
    text = "".join([detokenizer.push(token) for token in ids])
    assert text + detokenizer.finish() == codec.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=30))
def test_no_piece_ends_inside_a_character(text: str) -> None:
    """Each piece of a valid text is a piece of that text: a character whose bytes come token by token comes out once, whole."""
    codec, said = byte_level(), ""
    detokenizer = Detokenizer(codec)
    for token in codec.encode(text):
        said += detokenizer.push(token)
        assert text.startswith(said)
    assert said + detokenizer.finish() == text


@pytest.mark.parametrize("text", ["hello world", " a", "aé", "hell 🎉 or", "你好"])
def test_pieces_add_up_with_spaces_as_underlines_and_bytes_as_tokens(text: str) -> None:
    """SentencePiece-like tokenizers strip the first space and spell unknown characters in bytes; the pieces still add up."""
    codec = byte_fallback()
    ids = codec.encode(text)
    detokenizer = Detokenizer(codec)
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) + detokenizer.finish() == codec.decode(ids, skip_special_tokens=True) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_decoder_that_changes_its_mind_does_not_end_the_stream() -> None:
    """Byte tokens decode in runs: a stray byte after a character spoils the run, but what is out stays and the text goes on."""
    codec = byte_fallback()
    vocab = codec.backend.get_vocab()
    byte = {value: vocab[f"<0x{value:02X}>"] for value in (0xE2, 0x82, 0xAC, 0xFF)}
    letter = vocab["a"]
    detokenizer = Detokenizer(codec)
    pieces = [detokenizer.push(token) for token in [letter, *byte.values(), letter, letter]]
    assert pieces == ["a", "", "", "€", "", REPLACEMENT + "a", "a"]
    assert detokenizer.finish() == ""


def test_a_whole_character_comes_out_with_its_last_byte() -> None:
    """Text is never held back longer than needed: the piece is there as soon as the token that completes it has come."""
    codec = byte_level(258)  # bytes only
    detokenizer = Detokenizer(codec)
    assert [detokenizer.push(token) for token in codec.encode("a€b")] == ["a", "", "", "€", "b"]
    assert detokenizer.finish() == ""


def test_an_unfinished_character_is_one_replacement_or_nothing() -> None:
    """Bytes that never became a character end as a single U+FFFD, or are left out where a limit cut the answer."""
    codec = byte_level(258)
    cut = codec.encode("a🎉")[:-1]
    for keep, rest in ((True, REPLACEMENT), (False, "")):
        detokenizer = Detokenizer(codec)
        assert "".join(map(detokenizer.push, cut)) == "a"
        assert detokenizer.finish(keep_incomplete=keep) == rest
        assert detokenizer.finish() == ""


# ---- stop strings


def cut_slowly(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, reading one character at a time; the longest wins a tie."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


few_letters = st.text("ab☃", max_size=25)
stop_lists = st.lists(st.text("ab☃", min_size=1, max_size=5), max_size=4)


@given(pieces=st.lists(few_letters, max_size=8), stops=stop_lists, include=st.booleans())
@example(pieces=["a", "b", "a", "b", "☃"], stops=["abab☃", "b☃"], include=False)
@example(pieces=["aab"], stops=["aab", "ab"], include=False)
def test_the_cut_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str], include: bool) -> None:
    """However the text arrives, what comes out is the text before the first stop string, and all of it when there is none."""
    want, hit = cut_slowly("".join(pieces), stops, include)
    watch, said = StopStrings(stops, include=include), ""
    for piece in pieces:
        said += watch.push(piece)
        assert want.startswith(said), "a part of a stop string got out"
    if watch.hit is None:
        said += watch.finish()
    assert (said, watch.hit) == (want, hit)


@given(pieces=st.lists(few_letters, max_size=8), stops=stop_lists.filter(bool))
def test_only_what_may_become_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    """Before a hit the text held back is the longest end of the text that begins a stop string, never more."""
    watch, said, text = StopStrings(stops), "", ""
    for piece in pieces:
        said, text = said + watch.push(piece), text + piece
        if watch.hit is not None:
            return
        held = text[len(said) :]
        begins = [text[at:] for at in range(len(text)) if any(stop.startswith(text[at:]) for stop in stops)]
        assert held == (begins[0] if begins else "")


# ---- the two together, over chunks


def chunks_of(ids: list[int], cuts: list[int], reason: str, stop_token: int | None = None) -> list[TokenChunk]:
    """`ids` in chunks that end at `cuts`, the last of them terminal."""
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    chunks = [
        TokenChunk(request_id="r", token_ids=tuple(ids[a:b]), logprobs=tuple(-float(i) for i in range(a, b)))
        for a, b in itertools.pairwise(borders)
    ] or [TokenChunk(request_id="r")]
    last = chunks.pop()
    end = TokenChunk(
        request_id="r",
        token_ids=last.token_ids,
        logprobs=last.logprobs,
        status=RequestStatus.FINISHED,
        finish_reason=reason,  # type: ignore[arg-type]
        stop_token=stop_token,
    )
    return [*chunks, end]


@given(
    ids=token_ids(byte_level(), 25),
    cuts=st.lists(st.integers(0, 25), max_size=6),
    stops=st.lists(st.sampled_from(["a", "e", " ", "o\n", "\ufffd", "the"]), max_size=3),
    minimum=st.integers(0, 8),
    include=st.booleans(),
)
def test_chunks_do_not_show_in_the_text(ids, cuts, stops, minimum, include) -> None:
    """However an engine groups its tokens, text, token entries, their number and the reason to stop are the same."""

    def read(chunks):
        stream = TextStream(codec=byte_level(), stop=tuple(stops), min_tokens=minimum, include_stop=include, keep_tokens=True)
        text, tokens = "", []
        for chunk in chunks:
            delta = stream.feed(chunk)
            text, tokens = text + delta.text, tokens + list(delta.tokens)
            if delta.finish_reason:
                return text, tokens, stream.num_tokens, delta.finish_reason, delta.stop
        raise AssertionError("no delta said that it is the last")

    assert read(chunks_of(ids, cuts, "length")) == read(chunks_of(ids, list(range(len(ids))), "length"))


@given(ids=token_ids(byte_level(), 25), cuts=st.lists(st.integers(0, 25), max_size=6))
def test_token_entries_come_with_their_text(ids: list[int], cuts: list[int]) -> None:
    """In a stream an entry of log-probabilities comes no sooner than its text, and at the end every token has had its entry."""
    stream, text, entries = TextStream(codec=byte_level(), keep_tokens=True), "", []
    for chunk in chunks_of(ids, cuts, "length"):
        delta = stream.feed(chunk)
        text += delta.text
        entries += delta.tokens
        assert delta.finish_reason or all(entry.offset < len(text) for entry in delta.tokens)
    assert [(entry.token_id, entry.logprob) for entry in entries] == [(token, -float(i)) for i, token in enumerate(ids)]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_counted_and_not_shown(include: bool) -> None:
    """The token that ends an answer is generated, so it counts; its text is shown only where stop strings are shown too."""
    codec = byte_level()
    ids = codec.encode("the fox")
    stop_token = codec.encode(" the")[0]
    stream = TextStream(codec=codec, include_stop=include, keep_tokens=True)
    delta = stream.feed(chunks_of([*ids, stop_token], [], "stop", stop_token)[0])
    assert delta.text == "the fox" + codec.decode([stop_token]) * include
    assert (delta.finish_reason, delta.stop, stream.num_tokens) == ("stop", stop_token, len(ids) + 1)
    assert len(delta.tokens) == len(ids) + include


def test_stop_strings_wait_for_min_tokens() -> None:
    """Before min_tokens tokens a stop string is ordinary text."""
    codec = byte_level(258)
    stream = TextStream(codec=codec, stop=("b",), min_tokens=4)
    delta = stream.feed(chunks_of(codec.encode("abcdbe"), [], "length")[0])
    assert (delta.text, stream.num_tokens, delta.stop) == ("abcd", 5, "b")


def test_what_was_held_back_comes_out_at_the_end() -> None:
    """An answer that ends with the beginning of a stop string has that beginning in it."""
    codec = byte_level()
    stream = TextStream(codec=codec, stop=("fox☃",))
    deltas = [stream.feed(chunk) for chunk in chunks_of(codec.encode("the fox"), list(range(7)), "length")]
    assert "".join(delta.text for delta in deltas) == "the fox"
    assert "fox" not in "".join(delta.text for delta in deltas[:-1])
