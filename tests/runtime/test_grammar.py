"""Grammars in the engine: every answer follows its own, whatever happens to its request, and nobody else notices."""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from cb_ray.core.plan import BatchPlan, Row
from cb_ray.errors import InvalidRequestError
from cb_ray.grammar import Grammar
from cb_ray.messages import SamplingParams, TokenChunk
from cb_ray.runtime.grammar import GrammarCompiler, GrammarMasks
from cb_ray.runtime.model_runner import ModelRunner
from tests.runtime.driving import random_prompts
from tests.runtime.driving import run as drive
from tests.tiny import make_tokenizer

SHIRT = {
    "type": "object",
    "properties": {"size": {"enum": ["S", "M", "L"]}, "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["size", "tags"],
    "additionalProperties": False,
}
END = 3  # <|im_end|>


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> PreTrainedModel:
    """A random llama: left alone it writes gibberish, so whatever is in order is the grammar's doing."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


def run(model: PreTrainedModel, prompts: list[list[int]], count: int, **options: Any) -> tuple[list[TokenChunk], Any]:
    """In a small cache, whose laws are quick to check at every step."""
    return drive(model, prompts, count, **({"num_blocks": 200, "page_size": 16} | options))


def hot(seed: int, grammar: Grammar | None, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=2.0, seed=seed, eos_token_ids=(END,), grammar=grammar, **fields)


def text(tokenizer: Any, chunk: TokenChunk) -> str:
    return tokenizer.decode([token for token in chunk.token_ids if token != END])


def test_every_answer_follows_its_grammar(model: PreTrainedModel, tokenizer: Any) -> None:
    """Hot sampling, several grammars and none in one batch: each gets its own."""
    wishes = [
        Grammar.json_schema(SHIRT),
        Grammar.regex(r"[A-Z]{2}-[0-9]{3}"),
        None,
        Grammar.choice(["yes", 'no "way"']),
        Grammar.lark('start: "<" word ">"\nword: /[a-c]{4}/'),
        Grammar.lark('root ::= "x" [0-9] "y"'),
    ] * 2
    prompts = random_prompts([5] * len(wishes))
    chunks, _ = run(model, prompts, 120, sampling=[hot(seed, wish) for seed, wish in enumerate(wishes)])
    for chunk, wish in zip(chunks, wishes, strict=True):
        assert chunk.error is None
        if wish is None:
            continue
        said = text(tokenizer, chunk)
        assert chunk.finish_reason == "stop", said
        if wish.kind == "json_schema":
            value = json.loads(said)
            assert value["size"] in {"S", "M", "L"} and len(value["tags"]) <= 3
        else:
            forms = r"[A-Z]{2}-[0-9]{3}|yes|no \"way\"|<[a-c]{4}>|x[0-9]y"
            assert re.fullmatch(forms, said), said


def test_rows_without_a_grammar_get_the_same_tokens(model: PreTrainedModel) -> None:
    """A grammar in the batch changes no other row, greedy or not."""
    prompts = random_prompts([4, 9, 6, 3])
    free = [SamplingParams(do_sample=False), hot(1, None), hot(2, None, repetition_penalty=1.3), hot(3, None)]
    alone, _ = run(model, prompts[:3], 20, sampling=free[:3])
    mixed, _ = run(model, prompts, 20, sampling=[*free[:3], hot(3, Grammar.json_object())])
    assert [chunk.token_ids for chunk in mixed[:3]] == [chunk.token_ids for chunk in alone]


def test_preemption_changes_no_answer(model: PreTrainedModel) -> None:
    """A request that lost its seat comes back with another matcher in the same state."""
    prompts = random_prompts([9] * 6)
    sampling = [hot(seed, Grammar.regex("([a-f]+ ){30}")) for seed in range(6)]
    wide, _ = run(model, prompts, 60, sampling=sampling)
    tight, stats = run(model, prompts, 60, sampling=sampling, num_blocks=12, max_batch_tokens=16)
    assert stats.num_preemptions > 0
    assert [chunk.token_ids for chunk in tight] == [chunk.token_ids for chunk in wide]


@pytest.mark.parametrize("lost_after", [1, 4, 9])
def test_failover_goes_on_inside_the_grammar(model: PreTrainedModel, tokenizer: Any, lost_after: int) -> None:
    """Another engine gets the prompt with the tokens so far, and knows where the answer began."""
    (prompt,) = random_prompts([7])
    grammar = Grammar.json_schema(SHIRT)
    (whole,), _ = run(model, [prompt], 80, sampling=hot(5, grammar))
    emitted = whole.token_ids[:lost_after]
    (rest,), _ = run(
        model, [[*prompt, *emitted]], 80 - lost_after, sampling=hot(5, grammar), fields={"resumed_tokens": lost_after}
    )
    assert emitted + rest.token_ids == whole.token_ids
    assert json.loads(text(tokenizer, whole))


def test_an_answer_may_be_complete_before_failover(model: PreTrainedModel) -> None:
    """The engine died between the last token and saying so: the next one only ends the answer."""
    (prompt,) = random_prompts([7])
    grammar = Grammar.choice(["yes"])
    (whole,), _ = run(model, [prompt], 10, sampling=hot(5, grammar))
    said = len(whole.token_ids)
    again = {"resumed_tokens": said}
    (rest,), _ = run(model, [[*prompt, *whole.token_ids]], 10 - said, sampling=hot(5, grammar, min_tokens=8), fields=again)
    assert rest.token_ids == (END,) and rest.finish_reason == "stop"


def test_a_complete_answer_ends_without_an_end_token(model: PreTrainedModel, tokenizer: Any) -> None:
    """Where nothing may follow, no step is spent on saying so; neither min_tokens nor ignore_eos makes more of it."""
    (prompt,) = random_prompts([5])
    for fields in ({}, {"min_tokens": 50}, {"ignore_eos": True}):
        (chunk,), _ = run(model, [prompt], 90, sampling=hot(1, Grammar.json_schema(SHIRT), **fields))
        assert END not in chunk.token_ids and chunk.finish_reason == "stop"
        assert json.loads(text(tokenizer, chunk))


def test_an_answer_that_may_go_on_ends_where_the_request_says(model: PreTrainedModel, tokenizer: Any) -> None:
    """Where the grammar allows an end: the request's own stop ids, never an end-of-sequence id that it ignores."""
    prompts = random_prompts([5] * 20)
    digits = Grammar.regex("[0-9]+")
    stop = tokenizer.convert_tokens_to_ids("x")
    plain, _ = run(model, prompts, 30, sampling=[hot(seed, digits) for seed in range(20)])
    assert any(chunk.stop_token == END for chunk in plain)
    ignoring, _ = run(model, prompts, 30, sampling=[hot(seed, digits, ignore_eos=True) for seed in range(20)])
    assert all(chunk.finish_reason == "length" and text(tokenizer, chunk).isdigit() for chunk in ignoring)
    own = [hot(seed, digits, ignore_eos=True, stop_token_ids=(stop,)) for seed in range(20)]
    stopped, _ = run(model, prompts, 30, sampling=own)
    assert {chunk.stop_token for chunk in stopped} <= {None, stop} and any(chunk.stop_token for chunk in stopped)
    patient, _ = run(model, prompts, 30, sampling=[hot(seed, digits, min_tokens=7) for seed in range(20)])
    assert all(len(chunk.token_ids) >= 7 for chunk in patient)


def test_the_limit_cuts_an_answer_short(model: PreTrainedModel, tokenizer: Any) -> None:
    """finish_reason length: the beginning of something that follows the grammar."""
    (prompt,) = random_prompts([5])
    (chunk,), _ = run(model, [prompt], 4, sampling=hot(1, Grammar.json_schema(SHIRT)))
    assert chunk.finish_reason == "length" and text(tokenizer, chunk).startswith("{")


def test_logprobs_are_of_what_was_allowed(model: PreTrainedModel) -> None:
    """Logprobs come after the mask, as after every other wish: the only token that is allowed has logprob 0."""
    (prompt,) = random_prompts([5])
    (chunk,), _ = run(model, [prompt], 10, sampling=hot(1, Grammar.choice(["\x01\x02"]), logprobs=2))
    assert len(chunk.token_ids) == 2 and chunk.logprobs == (0.0, 0.0)


def test_white_space_is_bounded(tokenizer: Any) -> None:
    """A small model cannot lose itself in the white space of JSON; a schema may say otherwise."""
    compiler = GrammarCompiler(lambda: tokenizer, 320, (END,))

    def takes(schema: Any, said: str) -> bool:
        tokens = tokenizer.encode(said)
        return compiler.compile(Grammar.json_schema(schema)).matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)

    assert takes(SHIRT, '{\n    "size": "S",\r\n    "tags": [\n        true,\n        false\n    ]\n}')
    assert takes(SHIRT, '{"size":"S","tags":[]}')
    assert not takes(SHIRT, '{  "size"')
    assert not takes(SHIRT, '{\n\n"size"')
    assert takes({**SHIRT, "x-guidance": {"whitespace_pattern": " *"}}, '{       "size"')


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar.json_schema({"type": "nonsense"}, param="response_format"), "nonsense"),
        (Grammar.json_schema({"not": {"type": "string"}}, param="response_format"), "not"),
        (Grammar.json_schema({"enum": ["\ud83c"]}, param="response_format"), "JSON schema"),
        (Grammar.regex("(a", param="response_format"), "unclosed"),
        (Grammar.lark("start: nowhere", param="response_format"), "nowhere"),
        (Grammar.lark('root ::= "', param="response_format"), "grammar"),
    ],
)
def test_a_bad_grammar_is_refused_by_name(tokenizer: Any, grammar: Grammar, words: str) -> None:
    """Before anything is computed, and without the library's inner state."""
    compiler = GrammarCompiler(lambda: tokenizer, 320, (END,))
    with pytest.raises(InvalidRequestError, match=words) as caught:
        compiler.compile(grammar)
    assert caught.value.param == "response_format" and len(str(caught.value)) < 600


def test_lenient_schemas_leave_out_what_cannot_be_enforced(tokenizer: Any) -> None:
    """response_format without strict."""
    compiler = GrammarCompiler(lambda: tokenizer, 320, (END,))
    assert compiler.compile(Grammar.json_schema({"type": "integer", "not": {"const": 1}}, lenient=True))


def test_few_grammars_are_kept_and_those_used_last(tokenizer: Any) -> None:
    """The cache is bounded; an equal grammar is compiled once while it is in there."""
    compiler = GrammarCompiler(lambda: tokenizer, 320, (END,), keep=2)
    a, b, c = (Grammar.regex(letter) for letter in "abc")
    first = compiler.compile(a)
    compiler.compile(b)
    assert compiler.compile(Grammar.regex("a")) is first
    compiler.compile(c)
    assert compiler.compile(a) is first and set(compiler._compiled) == {a, c}


def test_an_engine_without_a_tokenizer_says_so() -> None:
    """A model made in code has no files to take one from."""

    def load() -> Any:
        return AutoTokenizer.from_pretrained("/nowhere/at/all")

    with pytest.raises(InvalidRequestError, match="tokenizer="):
        GrammarCompiler(load, 320, ()).compile(Grammar.regex("a"))


def row(name: str, sampling: SamplingParams, history: list[int]) -> Row:
    return Row(name, 0, array("i", history), (), True, -1, sampling, 0, 0, 0, array("i", history), 1)


def test_masks_are_what_the_grammar_allows_token_by_token(tokenizer: Any) -> None:
    """The slow twin: a token is let through exactly where a fresh matcher takes it after the same tokens."""
    compiler = GrammarCompiler(lambda: tokenizer, 330, (END,))  # more logits than tokens: the rest is never let through
    masks = GrammarMasks(compiler)
    wishes = [Grammar.json_schema(SHIRT), Grammar.regex("(ab|cd)+"), Grammar.json_object(), Grammar.choice(["x"]), None]
    said: list[list[int]] = [[0] for _ in wishes]
    generator = torch.Generator().manual_seed(0)
    for _ in range(25):
        rows = [row(str(i), hot(0, wish), said[i]) for i, wish in enumerate(wishes)]
        logits = torch.zeros(len(wishes), 330)
        _, errors = masks.apply(logits, rows)
        assert not errors and not torch.isinf(logits[-1]).any()
        for i, wish in enumerate(wishes[:-1]):
            allowed = set(torch.isfinite(logits[i]).nonzero()[:, 0].tolist())
            twin = compiler.compile(wish).matcher.deep_copy()
            assert all(twin.consume_token(token) for token in said[i][1:])
            over = twin.is_stopped()
            if over:
                assert allowed == {END}
            for token in () if over else range(tokenizer.vocab_size):
                took = twin.deep_copy().try_consume_tokens([token]) == 1
                assert (token in allowed) == took, (wish, token, said[i])
            token = int(torch.multinomial(torch.isfinite(logits[i]).float(), 1, generator=generator))
            said[i] = [0] if token == END else [*said[i], token]
            if token == END:
                masks.forget([str(i)])


def test_masks_that_were_begun_early_are_those_of_the_tokens_that_came(tokenizer: Any) -> None:
    """A mask begun after a token is the one a fresh matcher makes; one that more tokens have overtaken is thrown away."""
    compiler = GrammarCompiler(lambda: tokenizer, 320, (END,))
    masks = GrammarMasks(compiler)
    wish = Grammar.regex("(ab|cd)+ef")
    letters = {letter: tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdef"}
    said = [[0] for _ in range(6)]  # enough rows for the executor, too

    def check() -> None:
        rows = [row(str(i), hot(0, wish), history) for i, history in enumerate(said)]
        logits = torch.zeros(len(rows), 320)
        assert masks.apply(logits, rows)[1] == {}
        fresh = torch.zeros(len(rows), 320)
        assert GrammarMasks(compiler).apply(fresh, rows)[1] == {}
        assert torch.equal(logits, fresh)

    check()
    for i, letter in enumerate("acacac"):
        said[i].append(letters[letter])
    assert masks.advance([row(str(i), hot(0, wish), []) for i in range(6)], [history[-1] for history in said]) == []
    for i in (0, 2):  # as after a preemption, or where steps overlap: there is more than the mask was begun for
        said[i] += [letters["b"], letters["c"]]
    check()


def test_tokens_that_do_not_follow_fail_their_request_alone(tokenizer: Any) -> None:
    """Tokens of another answer, sent as a failover's: the row gets an error, the others their tokens."""
    masks = GrammarMasks(GrammarCompiler(lambda: tokenizer, 320, (END,)))
    rows = [row("bad", hot(0, Grammar.regex("a+")), [0, 50]), row("good", hot(0, Grammar.regex("a+")), [0])]
    logits = torch.zeros(2, 320)
    _, errors = masks.apply(logits, rows)
    assert list(errors) == [0] and isinstance(errors[0], InvalidRequestError)
    assert torch.isinf(logits[1]).any() and not torch.isinf(logits[0]).any()


def test_an_id_that_is_used_again_begins_anew(tokenizer: Any) -> None:
    """The end of a request may be told in a step that samples nothing; the next one of that name is another."""

    class Zeros:
        """A model to which all tokens are equal."""

        def run(self, plan: BatchPlan, sampled: Any, every_token: bool) -> torch.Tensor:
            return torch.zeros(sum(row.samples for row in plan.rows), 320)

    masks = GrammarMasks(GrammarCompiler(lambda: tokenizer, 320, (END,)))
    runner = ModelRunner(Zeros(), torch.device("cpu"), grammars=masks)  # type: ignore[arg-type]
    for word in ("abc", "xyz"):
        asks = row("same", SamplingParams(do_sample=False, grammar=Grammar.choice([word])), [0])
        (token,) = runner.collect(runner.submit(BatchPlan(step=1, rows=(asks,)))).token_ids
        assert tokenizer.decode([token]) in word and tokenizer.decode([token])[0] == word[0]
        chunk = asks._replace(request_id="other", samples=False)
        runner.submit(BatchPlan(step=2, rows=(chunk,), released=("same",)))
