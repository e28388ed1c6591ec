"""An engine without a model, and a stage on which tests direct it from another process.

Owns `Stage` (an actor: opens and closes the tap, hears what engines do), `FakeEngine` (EngineLike) and `load_fake`.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import ray

from cb_ray.core.request import RequestLimits
from cb_ray.engine.intake import Terms
from cb_ray.engine.sampling_config import SamplingPolicy
from cb_ray.errors import WeightsError
from cb_ray.messages import EngineStats, GenerateRequest, RequestStatus, TokenChunk, Usage
from cb_ray.serving.engine_deployment import EngineSpec, LoadedEngine

STAGE = "cb-ray-test-stage"
PAGE = 4
ENDLESS, PACED = "endless", "paced"


@ray.remote(num_cpus=0, max_concurrency=1000)
class Stage:
    """`open` lets tokens flow, `close` stops them. `happened(kind, n)` returns once n events of a kind were heard."""

    def __init__(self) -> None:
        self.tap = asyncio.Event()
        self.tap.set()
        self.second = asyncio.Event()
        self.events: list[tuple[str, str, int]] = []
        self.changed = asyncio.Condition()

    async def open(self) -> None:
        self.tap.set()

    async def close(self) -> None:
        """Also forgets what happened, so that each test counts from zero."""
        self.tap.clear()
        self.second.clear()
        self.events.clear()

    async def go_on(self) -> None:
        """Lets those pass that wait after their third token."""
        self.second.set()

    async def goes_on(self) -> None:
        await self.second.wait()

    async def flows(self) -> None:
        await self.tap.wait()

    async def note(self, kind: str, request_id: str, pid: int) -> None:
        async with self.changed:
            self.events.append((kind, request_id, pid))
            self.changed.notify_all()

    async def happened(self, kind: str, count: int = 1) -> list[tuple[str, int]]:
        """(request id, pid) of all events of that kind, once there are `count`."""
        async with self.changed:
            await self.changed.wait_for(lambda: sum(event[0] == kind for event in self.events) >= count)
            return [event[1:] for event in self.events if event[0] == kind]


def token_of(request: GenerateRequest, index: int) -> int:
    """What the fake says: depends on the prompt and the position alone, so a moved stream can be checked for gaps."""
    prompt = request.token_ids[: len(request.token_ids) - request.resumed_tokens]
    return (sum(prompt) + request.resumed_tokens + index) % 97


class FakeEngine:
    """Emits `max_new_tokens` tokens, one chunk each, while the stage's tap is open; under the salt ENDLESS, one and no more; under
    PACED, three, and the others after `go_on`."""

    fatal_error = None

    def __init__(self) -> None:
        self.stage = ray.get_actor(STAGE, namespace="cb-ray-tests")
        self.live: dict[str, asyncio.Event] = {}
        self.steps = self.prompt = self.generated = self.finished = self.version = 0

    def start(self) -> None: ...

    def stop(self, block: bool = True, timeout: float | None = None, *, hard_stop: bool = False) -> None: ...

    @property
    def terms(self) -> Terms:
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=8, do_sample=False)
        policy = SamplingPolicy(config, None, vocab_size=1000, per_request=True, drop_unsupported=True, return_logprobs=False)
        return Terms(limits=RequestLimits(vocab_size=1000, max_length=512, max_cached_tokens=4096, page_size=PAGE), policy=policy)

    def pack_weights(self) -> Any:
        return str(self.version)

    def pause(self, *, invalidate: bool = True) -> Any:
        return nullcontext()

    def prepare_weights(self, source: Any) -> Any:
        if "bad" in str(source):
            raise WeightsError(f"{source} does not fit")
        return SimpleNamespace(fingerprint=str(source), source=source)

    def update_weights(self, source: Any, *, weights_version: int, recompute: bool = False, restore_from: Any = None) -> Any:
        update = self.prepare_weights(source) if isinstance(source, str) else source
        self._note("weights", f"{weights_version} {update.source}")
        self.version = weights_version
        return update

    def cancel_request(self, request_id: str) -> None:
        if request_id in self.live:
            self.live[request_id].set()

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.live),
            num_steps=self.steps,
            num_finished=self.finished,
            prompt_tokens=self.prompt,
            generated_tokens=self.generated,
        )

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        name, total, ready = request.request_id, request.max_new_tokens or 8, request.request_id == "cb-ray-ready"
        stopped = self.live[name] = asyncio.Event()
        self.prompt += len(request.token_ids)
        done = False
        if not ready:
            self._note("start", name)
        try:
            for index in range(total):
                if request.cache_salt == ENDLESS and index:
                    await stopped.wait()
                elif request.cache_salt == PACED and index + request.resumed_tokens == 3:
                    self._note("paced", name)
                    await self.stage.goes_on.remote()
                elif not ready:
                    await self._flow(stopped)
                self.steps += 1
                self.generated += 1
                done = index == total - 1 or stopped.is_set()
                yield self._chunk(request, index, done, stopped.is_set())
                if done:
                    break
            self.finished += 1
        finally:
            del self.live[name]
            if not done or stopped.is_set():
                self._note("cancelled", name)

    def _note(self, kind: str, name: str) -> None:
        """In a context of its own, since Ray cancels what a cancelled request has called."""
        contextvars.Context().run(self.stage.note.remote, kind, name, os.getpid())

    async def _flow(self, stopped: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(self._opened()), asyncio.ensure_future(stopped.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _opened(self) -> None:
        await self.stage.flows.remote()

    def _chunk(self, request: GenerateRequest, index: int, done: bool, stopped: bool) -> TokenChunk:
        usage = Usage(
            num_prompt_tokens=len(request.token_ids),
            num_generated_tokens=index + 1,
            started_time=0.0,
            weights_versions=(self.version,),
        )
        ended = RequestStatus.CANCELLED if stopped else RequestStatus.FINISHED
        return TokenChunk(
            request_id=request.request_id,
            token_ids=() if stopped else (token_of(request, index),),
            status=ended if done else RequestStatus.DECODING,
            finish_reason=("cancelled" if stopped else "length") if done else None,
            usage=usage if done else None,
        )


def load_fake(spec: EngineSpec) -> LoadedEngine:
    return LoadedEngine(engine=FakeEngine(), page_size=PAGE, cache_tokens=None)
