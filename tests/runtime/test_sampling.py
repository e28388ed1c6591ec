"""What sampling promises: transformers' cuts, exact distributions, and tokens that depend on their own seed and index alone."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cb_ray.core.plan import Row
from cb_ray.errors import InvalidRequestError, LogitsError, ProcessorError
from cb_ray.messages import SamplingParams
from cb_ray.runtime.sampling import sample, uniforms, warp
from tests.runtime.driving import run
from tests.tiny import break_token, make_model

V = 40
NAN_TOKEN = 319


def row(sampling: SamplingParams, *, seed=1, index=0, history=(), num_prompt=0, min_tokens_left=0) -> Row:
    known = array("i", history) if sampling.reads_history else None
    return Row("r", 0, array("i", [1]), (), True, -1, sampling, seed, index, min_tokens_left, known, num_prompt)


def logits(seed: int, rows: int = 1, vocab: int = V) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, V + 5),
    top_p=st.floats(0.05, 1),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_cuts_are_those_of_transformers(seed, temperature, top_k, top_p, min_p) -> None:
    """Temperature, top-k, top-p and min-p keep exactly the tokens that transformers' warpers keep, with their scores."""
    scores = logits(seed)
    expected = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        expected = TopKLogitsWarper(min(top_k, V))(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    found = warp(scores, [SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)])
    borderline = (found == -torch.inf) != (expected == -torch.inf)
    assert borderline.sum() <= 1, "at most the token on the very border may differ by rounding"
    kept = ~borderline & (expected > -torch.inf)
    torch.testing.assert_close(found[kept], expected[kept])


def test_top_p_of_a_flat_distribution_sorts_everything() -> None:
    """When the best thousand tokens hold too little mass, the cut is found over the whole vocabulary."""
    scores = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) * 0.01
    found = warp(scores, [SamplingParams(top_p=0.9)])
    expected = TopPLogitsWarper(0.9)(None, scores)
    assert abs(int((found > -torch.inf).sum()) - int((expected > -torch.inf).sum())) <= 2


@given(seed=st.integers(0, 200), penalty=st.floats(0.5, 2), history=st.lists(st.integers(0, V - 1), min_size=1, max_size=9))
def test_repetition_penalty_is_that_of_transformers(seed, penalty, history) -> None:
    """It looks at prompt and output, each token once."""
    scores = logits(seed)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), scores.clone())
    result = sample(scores, [row(SamplingParams(do_sample=False, repetition_penalty=penalty, logprobs=0), history=history)], [0])
    assert result.token_ids == [int(expected.argmax())]
    assert result.logprobs == pytest.approx([float(expected.log_softmax(-1).max())], abs=1e-5)


@pytest.mark.parametrize("penalty", [5e-324, 0.5, 1.5, 1e308])
def test_no_penalty_allows_what_was_forbidden(penalty) -> None:
    """A token that a grammar has taken away is at -inf before the penalties, and after them."""
    scores = torch.zeros(1, V)
    scores[0, 2:] = -torch.inf
    params = SamplingParams(repetition_penalty=penalty, temperature=1e30, logprobs=5, seed=1)
    found = sample(scores, [row(params, history=[1, 2, 3], num_prompt=2)], [0])
    assert not found.errors and found.token_ids[0] < 2
    assert [logprob for _, logprob in found.top_logprobs[0][2:]] == [-torch.inf] * 3


def test_a_request_that_forbids_everything_is_told_so() -> None:
    """It is the request's fault, not the replica's: nobody sends it to another one, where it would fail again."""
    params = SamplingParams(allowed_token_ids=(5,), logit_bias=((5, -math.inf),), seed=1)
    for shown in (None, 0):
        found = sample(logits(1), [row(replace(params, logprobs=shown))], [0])
        assert isinstance(found.errors[0], InvalidRequestError)


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    """A token of the prompt is not penalised; each generated one is, once or by its count."""
    scores = torch.zeros(1, V)
    scores[0, [3, 4, 5]] = torch.tensor([1.0, 0.9, 0.8])
    params = SamplingParams(do_sample=False, presence_penalty=0.15)
    assert sample(scores, [row(params, history=[3, 3, 9], num_prompt=2)], [0]).token_ids == [3]
    assert sample(scores, [row(params, history=[9, 3], num_prompt=1)], [0]).token_ids == [4]
    params = SamplingParams(do_sample=False, frequency_penalty=0.15)
    assert sample(scores, [row(params, history=[9, 3, 3, 4], num_prompt=1)], [0]).token_ids == [5]


def test_bias_bad_words_minimum_and_allowed_ids() -> None:
    """Each of them moves the choice of its own row."""
    scores = torch.zeros(1, V)
    scores[0, [3, 4, 5]] = torch.tensor([1.0, 0.9, 0.8])
    cases = [
        (SamplingParams(do_sample=False, logit_bias=((5, 1.0),)), {}, 5),
        (SamplingParams(do_sample=False, bad_words=((3,),)), {"history": [1]}, 4),
        (SamplingParams(do_sample=False, bad_words=((1, 3),)), {"history": [2, 1]}, 4),
        (SamplingParams(do_sample=False, bad_words=((1, 3),)), {"history": [1, 2]}, 3),
        (SamplingParams(do_sample=False, stop_token_ids=(3,), min_tokens=2), {"min_tokens_left": 2}, 4),
        (SamplingParams(do_sample=False, allowed_token_ids=(5, 9)), {}, 5),
        (SamplingParams(temperature=0.0), {}, 3),
        (SamplingParams(top_k=1), {}, 3),
    ]
    rows = [row(params, **extra) for params, extra, _ in cases]
    result = sample(scores.expand(len(cases), -1).clone(), rows, list(range(len(cases))))
    assert result.token_ids == [token for _, _, token in cases]


def test_a_token_depends_on_its_seed_and_index_alone() -> None:
    """The same row gives the same token alone, in company, and in any place of the batch."""
    params = SamplingParams(temperature=1.3)
    scores = logits(7, rows=5)
    rows = [row(params, seed=s, index=i) for s, i in [(1, 0), (1, 1), (2, 0), (9, 4), (1, 7)]]
    together = sample(scores, rows, list(range(5))).token_ids
    alone = [sample(scores[i : i + 1], [rows[i]], [0]).token_ids[0] for i in range(5)]
    backwards = sample(scores.flip(0), rows[::-1], list(range(5))).token_ids[::-1]
    assert together == alone == backwards


def test_what_one_row_asks_for_changes_no_other_row() -> None:
    """Logprobs and a penalty for one row leave the others' tokens, and bf16 logits are chosen from as their floats are."""
    scores = logits(8, rows=4).bfloat16()
    plain = [row(SamplingParams(temperature=1.2, top_p=0.9), seed=s) for s in range(3)]
    alone = sample(scores[:3], plain, [0, 1, 2]).token_ids
    for other in (SamplingParams(logprobs=2), SamplingParams(repetition_penalty=1.3), SamplingParams(do_sample=False)):
        mixed = sample(scores, [*plain, row(other, history=[3])], [0, 1, 2, 3])
        assert mixed.token_ids[:3] == alone
        assert (mixed.logprobs is None) == (other.logprobs is None)
    assert sample(scores[:3].float(), plain, [0, 1, 2]).token_ids == alone


HUGE = [2**31, 2**63, 2**70]


@settings(max_examples=200, deadline=None)
@given(
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 5e-324, 1e-40, 1e-30, 1.0, 1e30, 1e308]),
        top_k=st.sampled_from([-1, 0, 1, 3, *HUGE]),
        top_p=st.sampled_from([5e-324, 1e-10, 0.5, 1.0]),
        min_p=st.sampled_from([0.0, 5e-324, 1.0]),
        min_tokens_to_keep=st.sampled_from([1, 2, *HUGE]),
        repetition_penalty=st.sampled_from([5e-324, 1.0, 1e308]),
        logit_bias=st.sampled_from([(), ((1, 1e308), (2, -1e308))]),
        min_tokens=st.sampled_from([0, *HUGE]),
        seed=st.sampled_from([None, -(2**70), *HUGE]),
        logprobs=st.sampled_from([None, 0, 20]),
    )
)
def test_no_number_in_a_request_fails_a_step(params) -> None:
    """A top_k of 2**63 ended the engine and every request in it, a repetition_penalty of 5e-324 its own request as if the replica
    were lost: whatever number a request asks for, it and the row beside it get their tokens."""
    beside = row(SamplingParams(seed=5), seed=5)
    scores = logits(3, 2)
    alone = sample(scores[1:], [beside], [0]).token_ids
    found = sample(scores, [row(params, history=[1, 2, 3], num_prompt=2), beside], [0, 1])
    assert found.token_ids[1:] == alone
    assert not found.errors


def test_the_numbers_are_uniform_and_independent_of_company() -> None:
    """Means, spread and neighbouring seeds or indices look random; a number is a pure function of (seed, index)."""
    numbers = uniforms([s for s in range(200) for _ in range(200)], [i for _ in range(200) for i in range(200)]).view(200, 200)
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(numbers.std()) == pytest.approx(12**-0.5, abs=0.01)
    for shifted in (numbers[1:], numbers[:, 1:].T):
        left = numbers[:-1] if shifted.shape[0] == 199 and shifted.shape[1] == 200 else numbers[:, :-1].T
        assert abs(float(torch.corrcoef(torch.stack([left.flatten(), shifted.flatten()]))[0, 1])) < 0.02
    assert uniforms([5], [3]).item() == uniforms([1, 5], [9, 3])[1].item()


def test_sampled_frequencies_are_the_distribution() -> None:
    """20,000 draws over 40 tokens: chi-square below its 0.999999 quantile (a false alarm once in a million)."""
    scores = logits(3)
    probabilities = scores.softmax(-1)[0].double()
    count = 20_000
    rows = [row(SamplingParams(), seed=4, index=i) for i in range(count)]
    tokens = sample(scores.expand(count, -1), rows, list(range(count))).token_ids
    seen = torch.bincount(torch.tensor(tokens), minlength=V).double()
    expected = probabilities * count
    large = expected > 5
    chi = float(((seen - expected)[large] ** 2 / expected[large]).sum())
    assert chi < 100


def test_what_is_cut_off_is_never_drawn() -> None:
    """Whatever the random number, a token at -inf is not chosen; the highest numbers stay inside the vocabulary."""
    scores = torch.full((1, V), -torch.inf)
    scores[0, 7] = 0.0
    scores[0, 11] = -1.0
    rows = [row(SamplingParams(), seed=s) for s in range(500)]
    assert set(sample(scores.expand(500, -1).clone(), rows, list(range(500))).token_ids) == {7, 11}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("params", [SamplingParams(do_sample=False), SamplingParams(), SamplingParams(logprobs=2)])
def test_logits_that_are_no_numbers_fail_their_own_row(params, value) -> None:
    """NaN or infinity in one row is that row's error, which says that it is the model's; its neighbours are sampled."""
    scores = logits(1, rows=3)
    scores[1] = value
    result = sample(scores, [row(params)] * 3, [4, 5, 6])
    assert set(result.errors) == {5} and isinstance(result.errors[5], LogitsError)
    assert len(result.token_ids) == 3 and all(0 <= token < V for token in result.token_ids)


@pytest.mark.parametrize(
    ("value", "wanted"), [(0.0, InvalidRequestError), (-torch.inf, InvalidRequestError), (torch.nan, LogitsError)]
)
def test_forbidding_everything_is_the_requests_fault_and_nan_the_models(value, wanted) -> None:
    """What the request itself leaves without a token is its own fault; NaN stays the model's, whatever the request forbids."""
    everything = tuple((token, -torch.inf) for token in range(V))
    result = sample(torch.full((1, V), value), [row(SamplingParams(logit_bias=everything))], [0])
    assert isinstance(result.errors[0], wanted)
    assert result.errors[0].code == ("nan_logits" if wanted is LogitsError else "nothing_to_choose_from")


def test_a_processor_that_raises_fails_its_own_row() -> None:
    """A further processor sees the whole history of its row; when it raises, only that request ends."""
    seen = []

    def processor(ids, scores):
        seen.append(ids.tolist())
        if ids[0, 0] == 9:
            raise KeyError("broken")
        return scores

    params = SamplingParams(do_sample=False, full_history=True)
    rows = [row(params, history=[1, 2, 3]), row(params, history=[9])]
    result = sample(logits(1, rows=2), rows, [0, 1], [processor])
    assert seen == [[[1, 2, 3]], [[9]]] and set(result.errors) == {1}
    assert isinstance(result.errors[1], ProcessorError) and "KeyError: 'broken'" in str(result.errors[1])


def test_the_best_logprobs_are_listed() -> None:
    """`logprobs=n` names the n best tokens, best first; the chosen one's logprob is among them when greedy."""
    scores = logits(5)
    result = sample(scores, [row(SamplingParams(do_sample=False, logprobs=3))], [2])
    values, ids = scores.log_softmax(-1)[0].topk(3)
    assert [token for token, _ in result.top_logprobs[2]] == ids.tolist()
    assert result.logprobs == pytest.approx([float(values[0])], abs=1e-5)


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1, 2**70])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    """A client's seed of -1 once ended the engine: random numbers were made from unsigned seeds."""
    model = make_model("llama")
    sampling = [SamplingParams(temperature=2.0, seed=seed)] * 2
    chunks, _ = run(model, [[5, 6]] * 2, 6, sampling=sampling, num_blocks=16, page_size=8)
    assert chunks[0].error is None and chunks[0].token_ids == chunks[1].token_ids


@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
def test_a_broken_embedding_fails_only_the_prompts_that_have_it(backend: str) -> None:
    """A model with NaN in one row of its table: prompts with that token fail, and pages that held NaN are used again by others."""
    model = make_model("llama")
    whole = [[5, 6, 7], [11] * 20, [15, 16]]
    wanted, _ = run(model, whole, 6, backend=backend, num_blocks=64, page_size=8)
    assert NAN_TOKEN not in {token for chunk in wanted for token in chunk.token_ids}, (
        "the test's token must not be one that the model says"
    )
    break_token(model, NAN_TOKEN)
    poisoned = [[5, 6, NAN_TOKEN], [NAN_TOKEN] * 20, whole[0], whole[1], [5, 6, NAN_TOKEN, 7], whole[2], [NAN_TOKEN] * 21]
    again = poisoned * 2  # more than there are seats and pages for at once
    chunks, stats = run(model, again, 6, backend=backend, num_blocks=12, page_size=8, max_requests_per_batch=3)
    for prompt, chunk in zip(again, chunks, strict=True):
        if NAN_TOKEN in prompt:
            assert isinstance(chunk.error, LogitsError) and chunk.token_ids == ()
        else:
            assert chunk.error is None and chunk.token_ids == wanted[whole.index(prompt)].token_ids
    assert stats.num_failed == sum(NAN_TOKEN in prompt for prompt in again)
