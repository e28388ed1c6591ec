"""The side of a manager that requests are handed to and outputs are fetched from; the same over one engine or a whole pool.

Owns `RequestSide`. Knows the way in (`Intake`) and where outputs go (`Outbox`, `Results`); no engine, no thread of its own. Every
method may be called from any thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..errors import EngineStoppedError, InvalidRequestError
from ..messages import GenerateRequest, GenerationOutput, TokenChunk
from .intake import Intake, plain_ids
from .mailbox import Callback, Mailbox, Outbox, Results
from .outputs import OutputRecord

logger = logging.getLogger(__name__)


class RequestSide:
    """See the module. A subclass sets the three attributes before the first call."""

    _intake: Intake
    _outbox: Outbox
    _results: Results
    is_tp_driver: bool = True  # the rank that takes requests and gives outputs; the other ranks of a divided model follow it

    # ---- requests in --------------------------------------------------------------------------------------------------------

    def add_request(
        self,
        input_ids: Iterable[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
        num_return_sequences: int | None = None,
        **sampling: Any,
    ) -> str | None:
        """Hand in one prompt; returns its id, or None with a warning when the engine takes no more. None on ranks that do not lead.

        What is left out comes from the generation config. `sampling` are fields of SamplingParams, for engines made with
        `per_request_processors=True`. Raises InvalidRequestError (a ValueError) for what can never be served and for an id that
        is in use, QueueFullError (a queue.Full) when `max_queue_size` requests wait.
        """
        if not self.is_tp_driver or self._refuses(input_ids):
            return None
        prompt = self._intake.prompt(
            input_ids,
            max_new_tokens=max_new_tokens,
            stream=streaming,
            record_timestamps=record_timestamps,
            eos_token_id=eos_token_id,
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
            sampling=sampling,
        )
        try:
            return self._intake.hand_in([prompt], [request_id], num_return_sequences=num_return_sequences).families[0][0]
        except EngineStoppedError:
            self._refuses(input_ids)
            return None

    def add_requests(
        self,
        inputs: Iterable[Iterable[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        *,
        request_ids: Sequence[str] | None = None,
        eos_token_id: int | list[int] | None = None,
        num_return_sequences: int | None = None,
        **sampling: Any,
    ) -> list[str]:
        """Hand in several prompts, all or none; returns their ids in input order. None are taken on ranks that do not lead.

        Raises InvalidRequestError naming the first bad prompt, QueueFullError when they do not all find a place, and
        EngineStoppedError when the engine takes no more.
        """
        if not self.is_tp_driver:
            return []
        if self._intake.refusing is not None:
            raise EngineStoppedError(self._intake.refusing)
        prompts: list[GenerateRequest] = []
        for index, input_ids in enumerate(inputs):
            try:
                prompt = self._intake.prompt(
                    input_ids,
                    max_new_tokens=max_new_tokens,
                    stream=streaming,
                    record_timestamps=record_timestamps,
                    eos_token_id=eos_token_id,
                    sampling=sampling,
                )
            except InvalidRequestError as error:
                raise InvalidRequestError(f"inputs[{index}]: {error.message}", error.param, error.code) from error
            prompts.append(prompt)
        names = [None] * len(prompts) if request_ids is None else list(request_ids)
        if len(names) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts need as many request_ids, got {len(names)}", param="request_ids")
        handed_in = self._intake.hand_in(prompts, names, num_return_sequences=num_return_sequences)
        return [family[0] for family in handed_in.families]

    def submit(self, request: GenerateRequest) -> None:
        """Hand in a request as it is; its outputs go to its handler or to `get_result`.

        Raises InvalidRequestError, QueueFullError or EngineStoppedError.
        """
        self._intake.hand_in([request], [request.request_id], num_return_sequences=1)

    def run_batch(
        self, inputs: Sequence[Iterable[int]], on_end: Callable[[], object], **arguments: Any
    ) -> dict[str, GenerationOutput]:
        """Serve a batch to its end; its outputs come in input order, children before their parent (see `Intake.run_batch`)."""
        return self._intake.run_batch(inputs, on_end, **arguments)

    def _refuses(self, input_ids: Iterable[int]) -> bool:
        reason = self._intake.refusing
        if reason is not None:
            logger.warning("a request is refused (%s): %s", reason, _preview(input_ids))
        return reason is not None

    def cancel_request(self, request_id: str) -> None:
        """End a request early: it gets a CANCELLED output with what it has, and so do its children. Unknown ids: nothing."""
        self._intake.cancel(request_id)

    # ---- outputs out --------------------------------------------------------------------------------------------------------

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The oldest output that nobody fetched yet, or the oldest one of `request_id`, waiting for it.

        None after `timeout` seconds, or when the engine has ended and nothing is left.
        """
        return self._results.get(request_id, timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, until the engine has ended and nothing is left."""
        while (output := self._results.get()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Outputs of one request as they come, up to its terminal one. While somebody iterates, nobody else gets them."""
        with self._results.claim(request_id):
            while (output := self._results.get(request_id)) is not None:
                yield output
                if output.is_finished():
                    return

    def register_result_handler(self, request_id: str, callback: Callback) -> None:
        """Outputs of `request_id` go to `callback`, on the running event loop, until the terminal one.

        Register before handing the request in. Raises RuntimeError without a running event loop.
        """
        self._outbox.register(request_id, callback, asyncio.get_running_loop())

    async def chunks(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Hand in a request and get its chunks, merged when the reader is late; leaving early cancels it in the engine.

        Raises InvalidRequestError, QueueFullError or EngineStoppedError at the first step.
        """
        await self._intake.compile_grammar(request.sampling.grammar)
        mailbox = Mailbox(self._outbox.bell(asyncio.get_running_loop()))
        self._intake.hand_in([request], [request.request_id], num_return_sequences=1, mailbox=mailbox)
        async for chunk in self._read(mailbox, {request.request_id}):
            yield chunk

    async def stream(
        self,
        input_ids: Iterable[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = True,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
        num_return_sequences: int | None = None,
        **sampling: Any,
    ) -> AsyncIterator[GenerationOutput]:
        """Like `add_request`, and its cumulative outputs as they come (those of its children, too); leaving early cancels it.

        A reader who is late gets fewer outputs with more tokens each. Raises EngineStoppedError when the engine takes no more.
        """
        await self._intake.compile_grammar(sampling.get("grammar"))
        prompt = self._intake.prompt(
            input_ids,
            max_new_tokens=max_new_tokens,
            stream=streaming,
            record_timestamps=record_timestamps,
            eos_token_id=eos_token_id,
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
            sampling=sampling,
        )
        mailbox = Mailbox(self._outbox.bell(asyncio.get_running_loop()))
        (family,), created = self._intake.hand_in(
            [prompt], [request_id], num_return_sequences=num_return_sequences, mailbox=mailbox
        )
        records = {name: OutputRecord(replace(prompt, request_id=name), created) for name in family}
        async for chunk in self._read(mailbox, set(family)):
            yield records[chunk.request_id].add(chunk).output()

    async def _read(self, mailbox: Mailbox, live: set[str]) -> AsyncIterator[TokenChunk]:
        try:
            while live:
                chunk = await mailbox.next()
                if chunk.is_terminal:
                    live.discard(chunk.request_id)
                yield chunk
        finally:
            self._intake.abandon(live)


def _preview(input_ids: Iterable[int]) -> str:
    """The first and last three ids, for a log line."""
    ids = plain_ids(input_ids)
    return repr(ids) if len(ids) <= 6 else f"[{', '.join(map(str, ids[:3]))}, …, {', '.join(map(str, ids[-3:]))}]"
