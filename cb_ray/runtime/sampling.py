"""From logits to tokens. Owns the order in which a row's wishes are applied, and the random number of each token.

Knows tensors and sampling parameters; no request, no batch mate. Rows are independent: what one asks for changes no other row.

    logits ─▶ bias, penalties, bad words, minimum length, allowed ids, further processors ─▶ greedy: argmax
                                                                      └▶ temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ inverse CDF

Seed contract: the random number of a token is a pure function of (seed, token index), never of the batch, the step or the
replica. The logprob of a token is taken from the scores after all of the above, as transformers has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..core.plan import Row, StepResult
from ..errors import CbRayError, InvalidRequestError, LogitsError, ProcessorError
from ..messages import SamplingParams, TopLogprobs
from .native.choosing import choose as native_choose
from .native.choosing import divisor

_CANDIDATES = 1024  # top-p looks at this many best tokens first; the whole vocabulary is sorted only if they do not suffice
_FAR = 1e8  # no penalty or bias takes a score further: divided by the least temperature, it is still a number

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (input_ids [1, n], scores [1, V]) -> scores [1, V]


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> torch.Tensor:
    """One number in [0, 1) per (seed, token index), float64: two rounds of the splitmix64 finalizer (Steele et al., OOPSLA
    2014).
    """
    with np.errstate(over="ignore"):
        z = np.array(seeds, np.uint64)
        for step in (np.array(indices, np.uint64) + np.uint64(1), np.uint64(1)):
            z = z + step * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z = z ^ (z >> np.uint64(31))
    return torch.from_numpy((z >> np.uint64(11)).astype(np.float64) * 2.0**-53)


@dataclass(slots=True)
class Sampled:
    """One step's tokens where they were chosen, on the device. `fetch` starts their way to the host, `result` needs it done."""

    tokens: torch.Tensor  # int64 [S]
    best: torch.Tensor  # [S]: each row's greatest score; no finite number: the row cannot be sampled
    rows: Sequence[Row]
    index_of: Sequence[int]
    errors: dict[int, Exception]
    shown: Sequence[int] = ()  # rows whose logprobs are wanted
    logprobs: torch.Tensor | None = None  # of their chosen tokens
    tops: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list[tuple[int, torch.Tensor, torch.Tensor]])

    def fetch(self) -> None:
        """Copy everything to the host without waiting; read it only after the device's work of this step."""
        self.tokens, self.best = _to_host(self.tokens), _to_host(self.best)
        if self.logprobs is not None:
            self.logprobs = _to_host(self.logprobs)
        self.tops = [(index, _to_host(values), _to_host(ids)) for index, values, ids in self.tops]

    def result(self) -> StepResult:
        """As the core takes it."""
        errors = {**_errors(self.best, self.rows, self.index_of), **self.errors}
        if self.logprobs is None:
            return StepResult(self.tokens.tolist(), errors=errors)
        chosen = [0.0] * len(self.index_of)
        for s, logprob in zip(self.shown, self.logprobs.tolist(), strict=True):
            chosen[s] = logprob
        tops = {index: tuple(zip(ids.tolist(), values.tolist(), strict=True)) for index, values, ids in self.tops}
        return StepResult(self.tokens.tolist(), chosen, top_logprobs=tops, errors=errors)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Into pinned memory, behind the device's work, when the tensor is on a device."""
    return tensor.to("cpu", non_blocking=True)


def sample(
    logits: torch.Tensor, rows: Sequence[Row], index_of: Sequence[int], processors: Sequence[Processor] = ()
) -> StepResult:
    """`choose_tokens` and its result, at once."""
    return choose_tokens(logits, rows, index_of, processors).result()


def choose_tokens(
    logits: torch.Tensor, rows: Sequence[Row], index_of: Sequence[int], processors: Sequence[Processor] = ()
) -> Sampled:
    """Choose one token per sampling row.

    `logits` [S, V] in any float dtype, one row per entry of `rows`; `index_of` is each row's place in its plan, under which
    extras and errors are reported. A row whose scores are not numbers fails alone.
    """
    shaped = [s for s, row in enumerate(rows) if processors or _is_shaped(row)]
    shown = [s for s, row in enumerate(rows) if row.sampling.logprobs is not None]
    scores = logits.to(torch.float32, copy=True) if shaped or shown else logits  # rows are changed in place below
    errors: dict[int, Exception] = {}
    for s in shaped:
        try:
            scores[s] = shape(scores[s], rows[s], processors)
        except Exception as error:
            errors[index_of[s]] = error if isinstance(error, CbRayError) else ProcessorError(f"{type(error).__name__}: {error}")
            scores[s] = 0.0
    if not shown:
        best, tokens = choose(scores, rows)
        return Sampled(tokens, best, rows, index_of, errors)
    quiet = [s for s, row in enumerate(rows) if row.sampling.logprobs is None]
    best = torch.empty(len(rows), device=scores.device)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    if quiet:
        found = choose(scores[quiet], [rows[s] for s in quiet])
        best[quiet], tokens[quiet] = found[0].float(), found[1].long()
    drawn = [s for s in shown if not rows[s].sampling.greedy]
    if drawn:
        scores[drawn] = warp(scores[drawn], [rows[s].sampling for s in drawn])
    of_shown = scores[shown]
    best[shown], tokens[shown] = of_shown.max(dim=-1)
    if drawn:
        tokens[drawn] = draw(scores[drawn], _numbers([rows[s] for s in drawn]))
    logprobs = of_shown - of_shown.logsumexp(dim=-1, keepdim=True)
    chosen = logprobs.gather(1, tokens[shown][:, None])[:, 0]
    wanted = [(place, s, rows[s].sampling.logprobs or 0) for place, s in enumerate(shown) if rows[s].sampling.logprobs]
    bests = [logprobs[place].topk(min(count, logprobs.shape[1])) for place, _, count in wanted]
    tops = [(index_of[s], values, ids) for (_, s, _), (values, ids) in zip(wanted, bests, strict=True)]
    return Sampled(tokens, best, rows, index_of, errors, shown, chosen, tops)


def choose(scores: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """(greatest score, token) of each row [S, V]: the greatest itself where the row is greedy, else drawn from what `warp` leaves.

    On a CPU by native kernels where there are any: the same choice, but for rounding, in a tenth of the time.
    """
    drawn = [s for s, row in enumerate(rows) if not row.sampling.greedy]
    numbers = _numbers(rows if drawn else ())
    found = native_choose(scores, [row.sampling for row in rows], numbers)
    if found is not None:
        return found
    if not drawn:
        best, tokens = scores.max(dim=-1)
        return best.float(), tokens
    scores = scores.to(torch.float32, copy=True)
    scores[drawn] = warp(scores[drawn], [rows[s].sampling for s in drawn])
    best, tokens = scores.max(dim=-1)
    tokens[drawn] = draw(scores[drawn], numbers[drawn])
    return best, tokens


def _numbers(rows: Sequence[Row]) -> torch.Tensor:
    return uniforms([row.seed for row in rows], [row.token_index for row in rows])


def _is_shaped(row: Row) -> bool:
    sampling = row.sampling
    return bool(sampling.weighs_history or sampling.logit_bias or sampling.allowed_token_ids or row.min_tokens_left)


def _errors(best: torch.Tensor, rows: Sequence[Row], index_of: Sequence[int]) -> dict[int, Exception]:
    """What is wrong with each row whose best score is no finite number, by its place in the plan."""
    good = torch.isfinite(best)
    if bool(good.all()):
        return {}
    return {index_of[s]: _error(float(best[s]), rows[s]) for s in torch.nonzero(~good)[:, 0].tolist()}


def _error(best: float, row: Row) -> Exception:
    """All of it at -inf is the request's own doing where it forbids tokens; NaN, infinity, and all else is the model's."""
    if best == -torch.inf and (row.sampling.grammar is not None or _is_shaped(row)):
        return InvalidRequestError(
            "what the request allows and forbids leaves no token to choose; the answer ends here", code="nothing_to_choose_from"
        )
    return LogitsError()


def shape(scores: torch.Tensor, row: Row, processors: Sequence[Processor] = ()) -> torch.Tensor:
    """Everything that looks at tokens rather than at the distribution. `scores` float32 [V]; may be changed in place."""
    sampling = row.sampling
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        within = [value if math.isinf(value) else min(max(value, -_FAR), _FAR) for value in values]
        scores[list(ids)] += torch.tensor(within, dtype=scores.dtype, device=scores.device)
    if row.history is not None and (sampling.weighs_history or processors):
        scores = _with_history(scores, row, processors)
    if row.min_tokens_left:
        scores[[token for token in sampling.stop_ids if token < scores.shape[0]]] = -torch.inf
    if sampling.allowed_token_ids:
        allowed = torch.full_like(scores, -torch.inf)
        ids = list(sampling.allowed_token_ids)
        allowed[ids] = scores[ids]
        scores = allowed
    return scores


def _with_history(scores: torch.Tensor, row: Row, processors: Sequence[Processor]) -> torch.Tensor:
    sampling = row.sampling
    assert row.history is not None
    history = torch.tensor(row.history, dtype=torch.int64, device=scores.device)
    if sampling.repetition_penalty != 1.0:
        seen = history.unique()
        values, penalty = scores[seen], min(max(sampling.repetition_penalty, 1e-30), 1e30)
        weighed = torch.where(values < 0, values * penalty, values / penalty).clamp(-_FAR, _FAR)
        scores[seen] = torch.where(values.isinf(), values, weighed)  # what a grammar forbids stays forbidden
    if sampling.presence_penalty or sampling.frequency_penalty:
        made, counts = history[row.num_prompt :].unique(return_counts=True)
        scores[made] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for word in sampling.bad_words:
        if len(word) == 1 or tuple(row.history[-(len(word) - 1) :]) == word[:-1]:
            scores[word[-1]] = -torch.inf
    for processor in processors:
        scores = processor(history[None], scores[None])[0]
    return scores


def warp(scores: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Temperature, top-k, top-p and min-p of each row, float32 [S, V] → the same with what is cut off at -inf.

    Top-k keeps ties of the k-th; top-p drops the least likely tokens whose probabilities add up to at most 1 - top_p, and
    always keeps the `min_tokens_to_keep` best (as transformers' processors do).
    """
    device = scores.device
    temperature = torch.tensor([divisor(p) for p in samplings], dtype=torch.float32, device=device)[:, None]
    scores = scores / temperature
    vocab = scores.shape[1]
    top_k = [min(p.top_k, vocab) if p.top_k > 0 else vocab for p in samplings]
    needs_order = [p.top_p < 1.0 or k < vocab for p, k in zip(samplings, top_k, strict=True)]
    if any(needs_order):
        some = [s for s, needed in enumerate(needs_order) if needed]
        scores[some] = _truncate(scores[some], [samplings[s] for s in some], [top_k[s] for s in some])
    if any(p.min_p > 0 for p in samplings):
        floor = torch.tensor([p.min_p for p in samplings], dtype=torch.float32, device=device)[:, None].log()
        scores = scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + floor, -torch.inf)
    return scores


def _truncate(scores: torch.Tensor, samplings: Sequence[SamplingParams], top_k: Sequence[int]) -> torch.Tensor:
    """Cut each row at the lowest score that top-k and top-p keep."""
    vocab = scores.shape[1]
    bounded = [k for k in top_k if k < vocab]
    width = min(vocab, max(_CANDIDATES, max(bounded, default=0)))
    best = scores.topk(width, dim=-1).values  # descending
    limits = torch.tensor(top_k, device=scores.device)[:, None]
    kth = best.gather(1, (limits - 1).clamp(max=width - 1))
    cut = limits < vocab
    scores = torch.where(cut & (scores < kth), -torch.inf, scores)
    kept = torch.where(cut & (best < kth), -torch.inf, best)
    total = scores.logsumexp(dim=-1, keepdim=True)
    mass = (kept - total).exp().cumsum(dim=-1)
    top_p = torch.tensor([p.top_p for p in samplings], dtype=torch.float32, device=scores.device)[:, None]
    if width < vocab and bool(((mass[:, -1:] < top_p) & (top_p < 1.0) & (kept[:, -1:] > -torch.inf)).any()):
        kept = scores.sort(dim=-1, descending=True).values  # a flat distribution: the candidates hold too little of it
        mass = (kept - total).exp().cumsum(dim=-1)
    before = mass - (kept - total).exp()  # probability of everything more likely
    fewest = torch.tensor([min(p.min_tokens_to_keep, vocab) for p in samplings], device=scores.device)[:, None]
    ranks = torch.arange(kept.shape[1], device=scores.device)
    keep = ((before < top_p) | (top_p >= 1.0) | (ranks < fewest)) & (kept > -torch.inf)
    lowest = torch.where(keep, kept, torch.inf).amin(dim=-1, keepdim=True)
    return torch.where((top_p < 1.0) & (scores < lowest), -torch.inf, scores)


def draw(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """One token per row by inverse CDF in vocabulary order: scores [S, V], numbers float64 [S] in [0, 1) → int64 [S]."""
    weights = torch.softmax(scores, dim=-1, dtype=torch.float64)
    cumulated = weights.cumsum(dim=-1)
    target = numbers.to(cumulated.device)[:, None] * cumulated[:, -1:]
    target = torch.minimum(target, torch.nextafter(cumulated[:, -1:], torch.zeros_like(target)))
    return torch.searchsorted(cumulated, target, right=True)[:, 0].clamp(max=scores.shape[1] - 1)


def best_of(logprobs: torch.Tensor, count: int | None) -> TopLogprobs:
    """The `count` best (token id, logprob) pairs of one row [V], best first."""
    values, ids = logprobs.topk(min(count or 0, logprobs.shape[0]))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def prompt_logprobs(logits: torch.Tensor, targets: torch.Tensor, count: int) -> tuple[list[float], list[TopLogprobs]]:
    """Logprobs that the model gave to tokens it was shown: logits [n, V] before tokens `targets` [n], raw (no warping)."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, targets.long()[:, None])[:, 0].tolist()
    return chosen, [best_of(row, count) for row in logprobs] if count else []
