"""Workloads from a description: so many requests a second, of such lengths, with such prefixes in common. Owns `Description`.

    prompt = a document, or what a conversation said so far │ tokens of its own

Times are a Poisson process, lengths are lognormal around their means, documents are chosen evenly or, `zipf` above 0, the n-th with
weight 1/n^zipf. Everything follows from the seed.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from ..errors import ConfigError, nearest
from .traces import own_pages
from .workload import Arrival, Told, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Lengths are tokens. `spread`: sigma of the lognormal lengths; 0: all are equal."""

    requests: int = 1000
    rate: float = 1.0  # per second
    documents: int = 0  # prefixes that requests have in common; 0: none
    document_tokens: int = 2048
    zipf: float = 0.0
    hot: float = 0.0  # this share of all requests is about document 0
    prompt_tokens: float = 512.0  # of a request's own
    answer_tokens: float = 128.0
    max_new_tokens: int | None = None
    spread: float = 0.5
    seed: int = 0

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> Description:
        """Raises ConfigError for an unknown name or a value that makes no sense."""
        known = set(cls.__dataclass_fields__)
        for name in values:
            if name not in known:
                raise ConfigError(f"a workload has no setting {name!r}; {nearest(name, known)}", name)
        try:
            made = cls(**values)  # type: ignore[arg-type]
            numbers = [made.requests >= 1, made.rate > 0, made.prompt_tokens >= 1, made.answer_tokens >= 1, made.spread >= 0]
        except TypeError as error:
            raise ConfigError(f"a workload's settings are numbers, got {dict(values)}", "workload") from error
        if not all(numbers):
            raise ConfigError(f"requests, rate, prompt_tokens and answer_tokens must be above 0, got {made}", "workload")
        return made

    def workload(self, page_size: int) -> Workload:
        return Workload("synthetic", page_size, lambda: self._make(page_size), asdict(self))

    def _make(self, page_size: int) -> Iterable[Told]:
        dice = random.Random(self.seed)
        weights = list(itertools.accumulate((n + 1) ** -self.zipf for n in range(self.documents)))
        share = self.document_tokens // page_size
        documents = [tuple([(n << 32 | page).to_bytes(16) for page in range(share)]) for n in range(self.documents)]
        at = 0.0
        for number in range(self.requests):
            at += dice.expovariate(self.rate)
            own = self._length(self.prompt_tokens, dice.gauss(0, 1))
            answer = self._length(self.answer_tokens, dice.gauss(0, 1))
            shared: tuple[bytes, ...] = ()
            if documents:
                hot = self.hot and dice.random() < self.hot
                shared = documents[0 if hot else bisect_right(weights, dice.random() * weights[-1], 0, len(weights) - 1)]
            tokens = len(shared) * page_size + own
            pages = shared + own_pages(number, tokens // page_size - len(shared))
            yield Told(Arrival(at, tokens, pages, self.max_new_tokens), min(answer, self.max_new_tokens or answer))

    def _length(self, mean: float, gauss: float) -> int:
        """Tokens, of that mean, at `gauss` standard deviations."""
        return max(1, round(math.exp(math.log(mean) - self.spread**2 / 2 + gauss * self.spread)))
