"""Choosing tokens natively, beside the torch code that says what temperature, top-k, top-p and min-p mean."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cb_ray.messages import SamplingParams
from cb_ray.runtime.native import NativeOps, Unavailable, load
from cb_ray.runtime.sampling import warp

TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    loaded = load()
    if isinstance(loaded, Unavailable):
        pytest.skip(f"no native kernels: {loaded.reason}")
    return loaded


def levels() -> list[str]:
    loaded = load()
    return ["portable"] if isinstance(loaded, Unavailable) else list(loaded.levels)


def sample(ops: NativeOps, logits: Tensor, wishes: list[SamplingParams], numbers: Tensor) -> tuple[Tensor, Tensor]:
    def floats(name: str) -> Tensor:
        return torch.tensor([float(getattr(wish, name)) for wish in wishes])

    def integers(name: str) -> Tensor:
        return torch.tensor([getattr(wish, name) for wish in wishes], dtype=torch.int32)

    kept = integers("min_tokens_to_keep")
    return ops.sample(logits, floats("temperature"), integers("top_k"), floats("top_p"), floats("min_p"), kept, numbers)


wishes = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    top_k=st.one_of(st.just(0), st.just(1), st.integers(2, 60), st.just(10_000)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    min_tokens_to_keep=st.integers(1, 4),
)


@pytest.mark.parametrize("level", levels())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(wishes, min_size=1, max_size=5),
    columns=st.sampled_from([1, 5, 63, 64, 65, 1000, 6000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0]),
    hidden=st.sampled_from([0.0, 0.9]),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 10_000),
)
def test_a_token_is_drawn_as_torch_would(
    ops: NativeOps,
    level: str,
    rows: list[SamplingParams],
    columns: int,
    spread: float,
    hidden: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Peaked and flat rows, ties, masked tokens, all wishes mixed in one batch: the token is where torch's running sum first
    exceeds the number, unless the number lies on the very edge of two tokens, or a cut on the edge of two scores.
    """
    draw = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(rows), columns, generator=draw) * spread).to(dtype)
    mask = torch.rand(len(rows), columns, generator=draw) < hidden
    mask[:, 0] = False
    logits = logits.masked_fill(mask, -math.inf)
    numbers = torch.rand(len(rows), generator=draw, dtype=torch.float64)
    with ops.at_level(level):
        best, tokens = sample(ops, logits, rows, numbers)
    torch.testing.assert_close(best, logits.float().amax(-1), rtol=0, atol=0)
    for r, wish in enumerate(rows):
        token = int(tokens[r])
        if wish.temperature == 0:
            assert token == int(logits[r].float().argmax())
            continue
        assert any(fits(logits[r : r + 1].float(), nudged, token, float(numbers[r])) for nudged in edges(wish)), (wish, r)


def edges(wish: SamplingParams) -> list[SamplingParams]:
    """The wish, and the same with its cuts moved by what rounding may move them."""

    def moved(by: float) -> SamplingParams:
        return SamplingParams(
            temperature=wish.temperature,
            top_k=wish.top_k,
            top_p=min(1.0, wish.top_p * (1 + by)) if wish.top_p < 1 else 1.0,
            min_p=min(1.0, wish.min_p * (1 + by)),
            min_tokens_to_keep=wish.min_tokens_to_keep,
        )

    return [moved(0.0), moved(1e-5), moved(-1e-5)]


def fits(scores: Tensor, wish: SamplingParams, token: int, number: float) -> bool:
    weights = torch.softmax(warp(scores, [wish]), dim=-1, dtype=torch.float64)[0]
    before = float(weights[:token].sum())
    return float(weights[token]) > 0 and before - 1e-5 <= number <= before + float(weights[token]) + 1e-5


def test_many_draws_have_the_distribution(ops: NativeOps) -> None:
    """Equally spaced numbers hit each kept token as often as its probability says."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 3.0]]).repeat(4000, 1)
    numbers = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    _, tokens = sample(ops, logits, [SamplingParams(temperature=1.0, top_k=3)] * 4000, numbers)
    expected = torch.tensor([2.0, 1.0, -math.inf, -math.inf, 3.0]).softmax(0)
    torch.testing.assert_close(torch.bincount(tokens, minlength=5) / 4000, expected, rtol=0, atol=3e-4)


def test_numbers_at_the_ends_choose_the_first_and_the_last_kept_token(ops: NativeOps) -> None:
    """0 takes the first token that is kept, the greatest number below 1 the last."""
    logits = torch.zeros(2, 200)
    logits[:, :7] = -math.inf
    logits[:, 190:] = -math.inf
    numbers = torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    _, tokens = sample(ops, logits, [SamplingParams()] * 2, numbers)
    assert tokens.tolist() == [7, 189]


def test_rows_that_are_not_numbers_are_reported_and_hurt_no_other(ops: NativeOps) -> None:
    """NaN, +inf and a row with nothing left: the greatest logit says so."""
    logits = torch.randn(5, 300)
    logits[0, 7] = math.nan
    logits[1, 8] = math.inf
    logits[2] = -math.inf
    logits[3] = -math.inf
    logits[3, 9] = 0.5
    best, tokens = sample(ops, logits, [SamplingParams(top_p=0.9)] * 5, torch.full((5,), 0.5, dtype=torch.float64))
    assert best.isfinite().tolist() == [False, False, False, True, True] and int(tokens[3]) == 9


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.5])
@pytest.mark.parametrize("columns", [5, 64, 300])
def test_one_token_among_forbidden_ones_is_found(ops: NativeOps, columns: int, value: float) -> None:
    """-inf is no trouble, wherever it is: what stands alone among it is the greatest, a number or not."""
    logits = torch.full((columns, columns), -math.inf)
    logits.fill_diagonal_(value)
    best, tokens = ops.greatest(logits)
    assert torch.equal(best, torch.full((columns,), value)) or (math.isnan(value) and bool(best.isnan().all()))
    assert tokens.tolist() == list(range(columns))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [1, 31, 32, 320, 1000])
def test_forbidden_tokens_are_minus_infinity_and_nothing_else_changes(ops: NativeOps, dtype: torch.dtype, vocab: int) -> None:
    """Bit by bit as the slow twin: words of all, of none and of some; rows that are not named, and what lies beyond a row, stay."""
    whole = torch.randn(5, vocab + 7).to(dtype)
    logits, before = whole[:, :vocab], whole.clone()
    words = -(-vocab // 32) + 1
    allowed = torch.randint(-(2**31), 2**31, (3, words), dtype=torch.int64).to(torch.int32)
    allowed[0, ::2], allowed[1, ::2], allowed[2] = 0, -1, -1
    places = torch.tensor([4, 0, 2])
    ops.forbid_(logits, places, allowed)
    for mask, place in zip(allowed.tolist(), places.tolist(), strict=True):
        for token in range(vocab):
            if not mask[token // 32] >> token % 32 & 1:
                before[place, token] = -math.inf
    assert torch.equal(whole, before)


def test_forbidding_refuses_places_and_masks_that_do_not_fit(ops: NativeOps) -> None:
    """A row that is not there, or too few bits, would be memory of somebody else."""
    logits, mask = torch.zeros(2, 64), torch.zeros(1, 2, dtype=torch.int32)
    for place in (-1, 2):
        with pytest.raises(RuntimeError, match="none of 2 rows"):
            ops.forbid_(logits, torch.tensor([place]), mask)
    with pytest.raises(RuntimeError, match="a bit for each of 64"):
        ops.forbid_(logits, torch.tensor([0]), mask[:, :1].contiguous())
    torch.library.opcheck(ops.forbid_, (logits, torch.tensor([1]), mask), test_utils=("test_schema", "test_faketensor"))


def test_sampling_survives_torch_compile_and_refuses_other_types(ops: NativeOps) -> None:
    """The fake agrees with the kernel; entries of another type are an error with a reason."""
    vectors = [torch.ones(2), torch.zeros(2, dtype=torch.int32), torch.ones(2), torch.zeros(2), torch.ones(2, dtype=torch.int32)]
    arguments = (torch.randn(2, 50), *vectors, torch.rand(2, dtype=torch.float64))
    torch.library.opcheck(ops.sample, arguments, test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(RuntimeError, match="numbers of float64"):
        ops.sample(*arguments[:-1], torch.rand(2))
