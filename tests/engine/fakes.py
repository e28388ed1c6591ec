"""An engine without a model: the real core over a runner that counts, can be held at a step, and can be broken.

The token at position p is `100 + p % 800`, whatever the batch, so what a request gets says where it stood. Nothing here sleeps: a
test lets single steps through, and waits for the engine to ask for the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cb_ray.config import ContinuousBatchingConfig, EngineFacts, WorkloadHints
from cb_ray.core.engine_core import EngineCore
from cb_ray.core.layout import CacheLayout, LayerSpec
from cb_ray.core.plan import BatchPlan, StepResult
from cb_ray.core.request import RequestLimits
from cb_ray.engine.manager import ContinuousBatchingManager
from cb_ray.engine.parts import EngineParts
from cb_ray.errors import LogitsError

VOCAB = 1000
PATIENCE = 20.0  # seconds after which a wait inside a test counts as a hang


def token_at(position: int) -> int:
    return 100 + position % 800


def tokens_after(prompt_length: int, count: int) -> list[int]:
    """What a prompt of this length is answered with."""
    return [token_at(prompt_length + i) for i in range(count)]


@dataclass
class Ticket:
    plan: BatchPlan
    result: StepResult


@dataclass
class FakeRunner:
    """Runs plans by counting. Free by default; `hold` makes it ask for each step."""

    depth: int = 1
    fail_at: int | None = None  # number of the step that raises, from 1
    bad_requests: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    plans: list[BatchPlan] = field(default_factory=list)
    in_flight: int = 0

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed: float = float("inf")
        self._asked = 0
        self.installed = False

    # ---- the runner's side --------------------------------------------------------------------------------------------------

    def submit(self, plan: BatchPlan) -> Ticket:
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._asked <= self._allowed, PATIENCE), "the test let nothing through"
        assert self.installed, "a step ran on a model that was not ours"
        if self._asked == self.fail_at:
            raise RuntimeError("injected failure 4711")
        self.plans.append(plan)
        self.in_flight += 1
        tokens = [token_at(row.start + row.length) for row in plan.rows if row.samples]
        errors: dict[int, Exception] = {
            index: LogitsError() for index, row in enumerate(plan.rows) if row.request_id in self.bad_requests
        }
        return Ticket(plan, StepResult(tokens, [-0.5] * len(tokens), errors=errors))

    def collect(self, ticket: Ticket) -> StepResult:
        self.in_flight -= 1
        return ticket.result

    def warmup(self, progress: bool = False) -> None:
        assert self.installed, "warm-up ran on a model that was not ours"
        self.log.append("warmup")

    def install(self) -> None:
        self.installed = True
        self.log.append("install")

    def restore(self) -> None:
        assert self.in_flight == 0 or self.fail_at is not None, "the model was given back during a step"
        self.installed = False
        self.log.append("restore")

    def reload(self) -> None:
        self.log.append("reload")

    def close(self) -> None:
        self.log.append("close")

    # ---- the test's side ----------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """From now on the engine waits before each step."""
        with self._changed:
            self._allowed = self._asked

    def allow(self, steps: int) -> None:
        """Let so many steps through, and wait until the engine asks for the one after them."""
        with self._changed:
            self._allowed += steps
            self._changed.notify_all()
        self.wait_until_asked(int(self._allowed) + 1)

    def release(self) -> None:
        with self._changed:
            self._allowed = float("inf")
            self._changed.notify_all()

    def wait_until_asked(self, step: int) -> None:
        """Until the engine wants to run its `step`-th step; it stands there if it is held."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._asked >= step, PATIENCE), f"step {step} never came"

    @property
    def steps(self) -> int:
        return len(self.plans)


@dataclass
class Engine:
    """A manager and what is behind it. `runners` has one entry for each time the engine was built."""

    manager: ContinuousBatchingManager
    runners: list[FakeRunner]
    cores: list[EngineCore]

    @property
    def runner(self) -> FakeRunner:
        return self.runners[-1]

    @property
    def core(self) -> EngineCore:
        return self.cores[-1]


class FakeModel:
    """Something with the attributes that the entry points ask for."""

    device = "cpu"
    dtype = "float32"

    def __init__(self, generation_config: Any = None) -> None:
        self.config = None
        self.generation_config = generation_config


def make_engine(
    generation_config: Any = None,
    *,
    prepare: Callable[[FakeRunner], None] = lambda runner: None,
    model: Any = None,
    clock: Callable[[], float] | None = None,
    **settings: Any,
) -> Engine:
    """A manager over fake parts. `settings` are facts, or fields of the config of the same name; `prepare` sees each new runner."""
    from transformers import GenerationConfig

    runners: list[FakeRunner] = []
    cores: list[EngineCore] = []
    facts = EngineFacts.of(**{"page_size": 4, "num_blocks": 64, "max_batch_tokens": 64, "max_requests_per_batch": 16, **settings})

    def build(model: Any, generation: Any, config: ContinuousBatchingConfig, hints: WorkloadHints) -> EngineParts:
        layout = CacheLayout.sized(
            [LayerSpec(0, "full", 1, 1, 1)], page_size=facts.page_size, itemsize=1, num_blocks=facts.num_blocks
        )
        limits = RequestLimits(
            vocab_size=VOCAB,
            max_length=512,
            max_cached_tokens=layout.max_tokens_alone(facts.max_batch_tokens),
            page_size=facts.page_size,
        )
        runner = FakeRunner()
        prepare(runner)
        runners.append(runner)
        cores.append(EngineCore(facts=facts, layout=layout, limits=limits))
        return EngineParts(cores[-1], runner, facts, limits)

    if generation_config is None:
        generation_config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)
    extra: dict[str, Any] = {} if clock is None else {"clock": clock}
    manager = ContinuousBatchingManager(model or FakeModel(generation_config), generation_config, build=build, **extra)
    return Engine(manager, runners, cores)


class Background:
    """A thread whose value or error can be asked for; joined with a limit, so that a hang is an error."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error

    def value(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "a thread hangs"
        if self._error is not None:
            raise self._error
        return self._value
