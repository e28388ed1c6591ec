"""A model and a runner without tensors: keys and values are integers in slots, read back through block tables.

A wrong table, a wrong slot, a wrong window or a wrong carried token is a wrong answer. The model has two layers per group, so
what a chunk of a prompt sees matters for what comes later:

    layer 0 stores the token; layer 1 stores a hash of the tokens that its position sees; the next token is a hash of what the
    last position sees in layer 1, over all groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cb_ray.config import EngineFacts
from cb_ray.core.engine_core import EngineCore
from cb_ray.core.layout import TRASH, CacheLayout, LayerGroup, LayerSpec
from cb_ray.core.plan import UNKNOWN_TOKEN, BatchPlan, Row, StepResult
from cb_ray.core.request import RequestLimits
from cb_ray.messages import GenerateRequest, SamplingParams, TokenChunk

VOCAB = 50
PRIME = 1_000_003


def mixed(values: Sequence[int]) -> int:
    total = 7
    for value in values:
        total = (total * 31 + value + 1) % PRIME
    return total


def one_by_one(prompt: Sequence[int], count: int, groups: Sequence[LayerGroup], stop: int | None = None) -> list[int]:
    """The slow twin: what the model says when each request is alone and nothing is cached."""
    tokens = list(prompt)
    for _ in range(count):
        outs = []
        for group in groups:
            contexts = [mixed(tokens[group.first_visible(p) : p + 1]) for p in range(len(tokens))]
            outs.append(mixed(contexts[group.first_visible(len(tokens) - 1) :]))
        tokens.append(mixed(outs) % VOCAB)
        if tokens[-1] == stop:
            break
    return tokens[len(prompt) :]


@dataclass
class FakeTicket:
    plan: BatchPlan
    result: StepResult


@dataclass
class FakeRunner:
    """Executes plans in the order they are submitted, as one compute stream would."""

    layout: CacheLayout
    depth: int = 1
    fail_at_step: int | None = None
    bad_requests: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tokens: list[dict[int, int]] = [{} for _ in self.layout.groups]
        self.contexts: list[dict[int, int]] = [{} for _ in self.layout.groups]
        self.host: list[dict[int, tuple]] = [{} for _ in self.layout.groups]
        self.last_sampled: list[int] = []

    def _slot(self, row: Row, group: int, position: int) -> int:
        page = self.layout.page_size
        block = row.tables[group][position // page]
        assert block != TRASH, f"position {position} of {row.request_id} points at the trash block"
        return block * page + position % page

    def _visible(self, row: Row, group: int, position: int, memory: dict[int, int]) -> list[int]:
        first = self.layout.groups[group].first_visible(position)
        return [memory[self._slot(row, group, p)] for p in range(first, position + 1)]

    def _move(self, plan: BatchPlan) -> None:
        page = self.layout.page_size
        for group, source, target in plan.parks:
            slots = range(source * page, source * page + page)
            self.host[group][target] = tuple((self.tokens[group].get(s), self.contexts[group].get(s)) for s in slots)
        for group, source, target in plan.unparks:
            for offset, (token, context) in enumerate(self.host[group].pop(source)):
                self.tokens[group][target * page + offset] = token
                self.contexts[group][target * page + offset] = context
        for group, source, target in plan.copies:
            for memory in (self.tokens[group], self.contexts[group]):
                for offset in range(page):
                    if source * page + offset in memory:
                        memory[target * page + offset] = memory[source * page + offset]

    def submit(self, plan: BatchPlan) -> FakeTicket:
        if plan.step == self.fail_at_step:
            raise RuntimeError("the device is gone")
        self._move(plan)
        ids = []
        for row in plan.rows:
            known = list(row.token_ids)
            if row.carry_from >= 0:
                assert known[-1] == UNKNOWN_TOKEN
                known[-1] = self.last_sampled[row.carry_from]
            assert UNKNOWN_TOKEN not in known
            ids.append(known)
        groups = range(len(self.layout.groups))
        for g in groups:  # all writes of a layer come before its reads
            for row, known in zip(plan.rows, ids, strict=True):
                for offset, token in enumerate(known):
                    self.tokens[g][self._slot(row, g, row.start + offset)] = token
            seen = [
                [mixed(self._visible(row, g, row.start + o, self.tokens[g])) for o in range(len(known))]
                for row, known in zip(plan.rows, ids, strict=True)
            ]
            for row, values in zip(plan.rows, seen, strict=True):
                for offset, value in enumerate(values):
                    self.contexts[g][self._slot(row, g, row.start + offset)] = value
        sampled, errors = [], {}
        for index, row in enumerate(plan.rows):
            if row.request_id in self.bad_requests:
                errors[index] = ValueError(f"{row.request_id} is poison")
            if row.samples:
                last = row.start + len(row.token_ids) - 1
                sampled.append(mixed([mixed(self._visible(row, g, last, self.contexts[g])) for g in groups]) % VOCAB)
        self.last_sampled = sampled
        return FakeTicket(plan, StepResult(sampled, errors=errors))

    def collect(self, ticket: FakeTicket) -> StepResult:
        return ticket.result


def layers_of(*windows: int | None, heads: Sequence[int] | None = None) -> list[LayerSpec]:
    """One layer per window (None: full attention)."""
    heads = heads or [1] * len(windows)
    return [
        LayerSpec(index=i, kind="full" if w is None else "sliding", kv_heads=h, k_dim=2, v_dim=2, window=w)
        for i, (w, h) in enumerate(zip(windows, heads, strict=True))
    ]


def facts_for(**changes) -> EngineFacts:
    """Resolved settings for tests of the core."""
    return EngineFacts.of(**changes)


class Harness:
    """A core, a runner and the loop of the engine thread, without the thread."""

    def __init__(self, *, windows=(None,), heads=None, page=4, blocks=64, budget=16, depth=1, host_sectors=0, **facts) -> None:
        self.layout = CacheLayout.sized(layers_of(*windows, heads=heads), page_size=page, itemsize=4, num_blocks=blocks)
        facts.setdefault("max_requests_per_batch", min(64, budget))
        self.facts = facts_for(page_size=page, max_batch_tokens=budget, **facts)
        chunk = self.layout.max_chunk(budget, 10_000)
        self.limits = RequestLimits(
            vocab_size=VOCAB, max_length=10_000, max_cached_tokens=self.layout.max_tokens_alone(chunk, 10_000), page_size=page
        )
        self.core = EngineCore(facts=self.facts, layout=self.layout, limits=self.limits, num_host_sectors=host_sectors)
        self.runner = FakeRunner(self.layout, depth)
        self.tickets: deque[FakeTicket] = deque()
        self.now = 0.0
        self.plans: list[BatchPlan] = []
        self.chunks: dict[str, list[TokenChunk]] = {}

    def add(self, request_id: str, prompt: Sequence[int], count: int | None, **fields) -> None:
        sampling = fields.pop("sampling", SamplingParams(do_sample=False))
        self.core.add(
            GenerateRequest(request_id=request_id, token_ids=tuple(prompt), max_new_tokens=count, sampling=sampling, **fields),
            self.now,
        )
        self.collect_chunks()

    def collect_chunks(self) -> None:
        for chunk in self.core.take_chunks():
            earlier = self.chunks.setdefault(chunk.request_id, [])
            assert not (earlier and earlier[-1].is_terminal), f"law L2: {chunk.request_id} goes on after its end"
            earlier.append(chunk)

    def step(self) -> bool:
        """One turn of the loop; False when there was nothing to do."""
        self.now += 1.0
        plan = self.core.plan(self.now)
        self.core.check()
        self.collect_chunks()
        if not plan.is_empty:
            self.plans.append(plan)
            self.tickets.append(self.runner.submit(plan))
        if self.tickets and (len(self.tickets) == self.runner.depth or plan.is_empty):
            ticket = self.tickets.popleft()
            self.core.commit(ticket.plan, self.runner.collect(ticket), self.now)
            self.core.check()
            self.collect_chunks()
            return True
        return not plan.is_empty

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def tokens(self, request_id: str) -> list[int]:
        return [token for chunk in self.chunks[request_id] for token in chunk.token_ids]
