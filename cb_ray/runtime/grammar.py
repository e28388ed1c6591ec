"""Grammars at work: which tokens may come next. Owns the compiled grammars of an engine, and a matcher for each running request.

Knows llguidance, tensors and plans; no request and no scheduler. A matcher is a function of (grammar, tokens of the answer so far),
so one that was dropped, with its request's seat or its replica, is made anew from the row's history.

    Intake ─▶ GrammarCompiler ─▶ Grammar.compiled          in a thread of its own, cached: steps never wait for it
    step   ─▶ forward ─▶ GrammarMasks.apply ─▶ sample ─▶ GrammarMasks.advance ─▶ rows whose answer is complete
                               └ masks of those that go on, in a thread beside ◀─┘

A row's next mask depends on nothing but its last token, so it is begun as soon as that is known: beside the commit, the next plan
and the next forward pass. Rows that come anew, or have more tokens than were seen, get theirs when it is needed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..core.plan import Row
from ..errors import InvalidRequestError
from ..grammar import JSON_WHITESPACE, Grammar
from .native.choosing import forbid as native_forbid

KEPT = 128  # compiled grammars that are kept while no request has them
_PARALLEL_FROM = 4  # masks of fewer rows are computed one after the other


@dataclass(slots=True)
class CompiledGrammar:
    """A grammar and the matcher that all its requests copy."""

    grammar: Grammar
    matcher: Any
    eos_token_ids: frozenset[int]
    num_tokens: int  # bits of a mask
    used: int = 0


class GrammarCompiler:
    """Compiles grammars for one tokenizer, one after the other in a thread of its own, and keeps those used last.

    `load` gives the tokenizer (transformers', with a Rust backend) when the first grammar comes; `vocab_size` is the number of
    logits; `eos_token_ids` may follow an answer that is complete.
    """

    def __init__(self, load: Callable[[], Any], vocab_size: int, eos_token_ids: Iterable[int], keep: int = KEPT) -> None:
        self._load, self._vocab_size, self._keep = load, vocab_size, keep
        self._eos = tuple(eos_token_ids)
        self._tokenizer: Any = None  # as everything below: changed in the thread only, or one whole reference at a time
        self._compiled: dict[Grammar, CompiledGrammar] = {}
        self._clock = itertools.count()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cb-ray grammars")

    def use(self, tokenizer: Any) -> None:
        """Take this tokenizer instead of the one that belongs to the model's files. Before the first grammar."""
        self._load = lambda: tokenizer

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Waits for the compiler's thread. Raises InvalidRequestError naming the grammar's `param`."""
        return self.submit(grammar).result()

    def submit(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """The same as a future; one that is cached does not wait behind others."""
        found = self._compiled.get(grammar)
        if found is None:
            return self._thread.submit(self._compile, grammar)
        found.used = next(self._clock)
        done: Future[CompiledGrammar] = Future()
        done.set_result(found)
        return done

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        found = self._compiled.get(grammar)
        if found is None:
            tokenizer = self._tokenizer = self._tokenizer or self._make_tokenizer(grammar)
            try:
                source = _source(grammar)
                matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(verbose_errors=False))
            except (ValueError, TypeError, KeyError) as error:  # UnicodeEncodeError is one, for half of a surrogate pair
                raise _refused(grammar, str(error)) from error
            if matcher.is_error():
                raise _refused(grammar, matcher.get_error())
            found = CompiledGrammar(grammar, matcher, frozenset(tokenizer.eos_tokens), tokenizer.vocab_size)
            while len(self._compiled) >= self._keep:
                del self._compiled[min(self._compiled, key=lambda kept: self._compiled[kept].used)]
            self._compiled[grammar] = found
        found.used = next(self._clock)
        return found

    def _make_tokenizer(self, grammar: Grammar) -> Any:
        from llguidance.hf import from_tokenizer

        try:
            tokenizer = self._load()
        except (OSError, ValueError) as error:
            raise InvalidRequestError(
                "this engine has no tokenizer, which grammars need; give the manager one: "
                f"ContinuousBatchingManager(…, tokenizer=…) ({type(error).__name__})",
                param=grammar.param,
            ) from error
        size = max(self._vocab_size, len(tokenizer))
        own = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        eos = [token for token in dict.fromkeys((*self._eos, *own)) if 0 <= token < size]
        return from_tokenizer(tokenizer, n_vocab=size, eos_token=eos or None)


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    if grammar.kind == "json_schema":
        options: Any = {"whitespace_pattern": JSON_WHITESPACE, "lenient": grammar.lenient}
        return LLMatcher.grammar_from_json_schema(grammar.text, defaults=options)
    if grammar.kind != "llguidance":
        return grammar_from("regex" if grammar.kind == "regex" else "grammar", grammar.text)
    grammars: Any = json.loads(grammar.text)
    for part in grammars["grammars"]:
        if "lark_grammar" in part:
            part["lark_grammar"] = grammar_from("grammar", part["lark_grammar"])
    return json.dumps(grammars, ensure_ascii=False)


def _refused(grammar: Grammar, reason: str) -> InvalidRequestError:
    what = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar", "llguidance": "grammar"}[grammar.kind]
    return InvalidRequestError(f"the {what} cannot be used: {_first_lines(reason)}", param=grammar.param, code="invalid_grammar")


def _first_lines(text: str, count: int = 6, width: int = 400) -> str:
    short = "\n".join(text.strip().splitlines()[:count])
    return short if len(short) <= width else short[: width - 1] + "…"


@dataclass(slots=True)
class _Answer:
    """Where one request stands in its grammar."""

    matcher: Any
    compiled: CompiledGrammar
    consumed: int = 0  # tokens of the answer that the matcher has seen
    error: Exception | None = None
    ahead: tuple[Future[np.ndarray], int] | None = None  # masks that are being made, and which of them is this one's

    def catch_up(self, row: Row) -> None:
        """Take in the tokens of the answer that are known and were not seen yet."""
        assert row.history is not None, "a row with a grammar brings its history"
        tokens = row.history[row.num_prompt + self.consumed :]
        self.consumed += len(tokens)
        if tokens and self.ahead is not None:
            self.take_mask()  # of a state that is left now; the thread must be done with the matcher
        if tokens and self.matcher.try_consume_tokens(list(tokens)) < len(tokens):
            self.fail(row, "the tokens so far do not follow it")

    def take_mask(self) -> np.ndarray | None:
        """The mask that was begun, once it is made; None if none was."""
        ahead, self.ahead = self.ahead, None
        return None if ahead is None else ahead[0].result()[ahead[1]]

    def fail(self, row: Row, reason: str) -> None:
        grammar = row.sampling.grammar
        assert grammar is not None
        self.error = self.error or _refused(grammar, reason)


@dataclass(slots=True)
class GrammarMasks:
    """The matchers of the requests that run: the engine thread's, but for those whose next mask is being made beside it."""

    compiler: GrammarCompiler
    _answers: dict[str, _Answer] = field(default_factory=dict[str, _Answer])
    _threads: int = field(default_factory=torch.get_num_threads)
    _executor: Any = None
    _beside: ThreadPoolExecutor | None = None

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests lost their seats: they ended, or will come again with all their tokens."""
        if self._answers:
            for name in request_ids:
                self._answers.pop(name, None)

    def apply(self, logits: torch.Tensor, rows: Sequence[Row]) -> tuple[Sequence[Row], dict[int, Exception]]:
        """Set the logits of all tokens that may not come next to -inf: `logits` [S, V], in place, one row per entry of `rows`.

        Returns the rows as they are to be sampled, and what is wrong with some of them, by their place.
        """
        places = [s for s, row in enumerate(rows) if row.sampling.grammar is not None]
        if not places:
            return rows, {}
        answers = [self._answer(rows[s]) for s in places]
        masks = self._masks(answers)
        rows, errors = list(rows), {}
        for mask, answer, s in zip(masks, answers, places, strict=True):
            if answer.matcher.is_error():
                answer.fail(rows[s], answer.matcher.get_error())
            if answer.error is not None:
                errors[s] = answer.error
                mask[:] = -1
            else:
                rows[s] = _with_ends(mask, answer, rows[s])
        _forbid(logits, places, masks)
        return rows, errors

    def advance(self, rows: Sequence[Row], tokens: Sequence[int]) -> list[int]:
        """Take in the tokens that were sampled; the places of rows whose answer is complete: nothing may follow it."""
        complete, others = list[int](), list[_Answer]()
        for s, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            answer = self._answers.get(row.request_id) if row.sampling.grammar is not None else None
            if answer is None or answer.error is not None or token in row.sampling.stop_ids:
                continue
            answer.consumed += 1
            if not answer.matcher.consume_token(token):
                answer.fail(row, f"token {token} does not follow it")
            elif answer.matcher.is_stopped():
                complete.append(s)
            else:
                others.append(answer)
        if others:
            self._beside = self._beside or ThreadPoolExecutor(1, thread_name_prefix="cb-ray masks")
            made = self._beside.submit(self._fill, others)
            for place, answer in enumerate(others):
                answer.ahead = made, place
        return complete

    def _answer(self, row: Row) -> _Answer:
        answer = self._answers.get(row.request_id)
        if answer is None:
            grammar = row.sampling.grammar
            assert grammar is not None
            compiled: CompiledGrammar = grammar.compiled or self.compiler.compile(grammar)
            answer = self._answers[row.request_id] = _Answer(compiled.matcher.deep_copy(), compiled)
        answer.catch_up(row)
        return answer

    def _masks(self, answers: Sequence[_Answer]) -> np.ndarray:
        """What may come next in each answer, one bit per token: [answers, words of 32 tokens]."""
        begun = [answer.take_mask() for answer in answers]
        missing = [answer for answer, mask in zip(answers, begun, strict=True) if mask is None]
        made = iter(self._fill(missing) if missing else ())
        return np.stack([next(made) if mask is None else mask for mask in begun])

    def _fill(self, answers: Sequence[_Answer]) -> np.ndarray:
        """Compute the masks of some answers. Runs in the thread beside, too, never for the same answers at once."""
        words = -(-answers[0].compiled.num_tokens // 32)
        masks, size = np.empty((len(answers), words), np.int32), words * 4
        matchers = [answer.matcher for answer in answers]
        if len(answers) < _PARALLEL_FROM:
            for place, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(masks[place].ctypes.data, size)
        else:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(num_threads=self._threads)  # by itself it leaves one core of two idle
            jobs = [(matcher, place) for place, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(jobs, masks.ctypes.data, size, len(answers))
        return masks


def _with_ends(mask: np.ndarray, answer: _Answer, row: Row) -> Row:
    """Settle which tokens may end the answer: the request's own stop ids where it is complete, and no other end-of-sequence id.

    Where nothing but the end may follow, it may follow whatever `min_tokens` says.
    """
    own, known = row.sampling.stop_ids, answer.compiled.eos_token_ids
    over = answer.matcher.is_stopped()
    if own != known and answer.matcher.is_accepting():
        for token in own:
            mask[token >> 5] |= _BITS[token & 31]
        if not over:
            for token in known - own:
                mask[token >> 5] &= ~_BITS[token & 31]
    return row._replace(min_tokens_left=0) if over and row.min_tokens_left else row


_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


def _forbid(logits: torch.Tensor, places: Sequence[int], masks: np.ndarray) -> None:
    """-inf where a bit of a row's mask is 0. `masks` int32 [len(places), words], the lowest bit first."""
    if native_forbid(logits, places, masks):
        return
    vocab = logits.shape[1]
    if logits.device.type == "cpu":
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=vocab, bitorder="little")
        forbidden = torch.from_numpy(np.equal(bits, 0))
        for s, row in zip(places, forbidden, strict=True):
            logits[s].masked_fill_(row, -torch.inf)
        return
    packed = torch.from_numpy(masks.copy()).pin_memory().to(logits.device, non_blocking=True)
    shifts = torch.arange(32, device=logits.device, dtype=torch.int32)
    forbidden = ((packed[:, :, None] >> shifts) & 1).view(len(places), -1)[:, :vocab] == 0
    index = torch.tensor(places, device=logits.device)
    logits[index] = logits[index].masked_fill(forbidden, -torch.inf)
