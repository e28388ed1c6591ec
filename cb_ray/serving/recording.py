"""What a door was asked and what came of it, as lines of a file: opt-in, bounded, and off the event loop.

Owns `RecordingSource`, which stands between a door and its tokens, and `RequestRecorder`, which writes. The event loop notes times and
puts one record into a bounded queue; a thread makes the line (`cb_ray/request_log.py` says of what) and writes it to a file that is
rotated by size. When the thread falls behind, records are dropped and counted, never waited for. No text is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import logging.handlers
import os
import queue
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from ..digests import page_digests
from ..errors import CbRayError, ConfigError
from ..messages import GenerateRequest, SamplingParams, TokenChunk
from ..request_log import LoggedRequest
from .args import RequestLogArgs

logger = logging.getLogger("ray.serve")

_QUEUED = 2000  # records that may wait to be written
_DEFAULTS = SamplingParams()


class Source(Protocol):
    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]: ...


@dataclass(slots=True, kw_only=True)
class Observed:
    """One request, as the event loop saw it."""

    request: GenerateRequest
    at_s: float
    began: float
    first: float | None = None
    ended: float = 0.0
    answer: list[int]
    outcome: str = "left"  # the caller went away
    num_cached: int = 0


class RecordingSource:
    """A source of tokens whose every request is recorded when it is over, however it ends."""

    def __init__(self, source: Source, recorder: RequestRecorder) -> None:
        self._source, self._recorder = source, recorder

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        """What the source gives; raises what it raises."""
        seen = Observed(request=request, at_s=time.time(), began=time.monotonic(), answer=[])
        try:
            async with contextlib.aclosing(self._source.generate(request)) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids:
                        seen.first = seen.first or time.monotonic()
                        seen.answer += chunk.token_ids
                    if chunk.usage is not None:
                        seen.num_cached = chunk.usage.num_cached_tokens
                    if chunk.is_terminal:
                        seen.outcome = type(chunk.error).__name__ if chunk.error is not None else chunk.finish_reason or "stop"
                    yield chunk
        except CbRayError as error:
            seen.outcome = type(error).__name__
            raise
        finally:
            seen.ended = time.monotonic()
            self._recorder.put(seen)


def recorded(source: Source, args: RequestLogArgs | None) -> Source:
    """`source`, recorded as `args` say; None: as it is."""
    return source if args is None else RecordingSource(source, RequestRecorder(args))


class _Lines(logging.Formatter):
    """An `Observed` as a line. Runs in the writing thread."""

    def __init__(self, args: RequestLogArgs) -> None:
        super().__init__()
        self._args, self._salt = args, args.salt or secrets.token_hex(16)

    def format(self, record: logging.LogRecord) -> str:
        seen: Any = record.msg
        request: GenerateRequest = seen.request
        args, as_tokens = self._args, self._args.content == "tokens"
        salt = f"{self._salt} {request.cache_salt}"
        pages = () if as_tokens else page_digests(request.token_ids, args.page_size, salt)
        sampling = {spec.name: getattr(request.sampling, spec.name) for spec in fields(SamplingParams)}
        session = (
            hashlib.blake2b(request.session.encode(), key=salt.encode()[:64], digest_size=8).hexdigest()
            if request.session
            else ""
        )
        return LoggedRequest(
            at_s=round(seen.at_s, 4),
            request_id=request.request_id,
            num_prompt=len(request.token_ids),
            num_answer=len(seen.answer),
            outcome=seen.outcome,
            page_size=args.page_size,
            pages=tuple([page.hex() for page in pages]),
            token_ids=request.token_ids if as_tokens else (),
            answer_ids=tuple(seen.answer) if as_tokens else (),
            num_cached=seen.num_cached,
            ttft_s=None if seen.first is None else round(seen.first - seen.began, 6),
            e2e_s=round(seen.ended - seen.began, 6),
            max_new_tokens=request.max_new_tokens,
            sampling={
                name: value for name, value in sampling.items() if value != getattr(_DEFAULTS, name) and _is_plain(name, value)
            },
            priority=request.priority,
            session=session,
        ).as_line()


def _is_plain(name: str, value: object) -> bool:
    """Whether JSON says it, and it is how tokens are chosen rather than what a grammar or a processor of the caller's holds."""
    return name != "full_history" and isinstance(value, (bool, int, float, str, tuple))


class _Queue(logging.handlers.QueueHandler):
    """Never waits: what finds the queue full is counted."""

    dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # it stays in this process

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)  # type: ignore[union-attr]
        except queue.Full:
            self.dropped += 1


class RequestRecorder:
    """Writes into a file of its own in `args.directory`. Raises ConfigError when it cannot."""

    def __init__(self, args: RequestLogArgs) -> None:
        self.path = Path(args.directory).expanduser() / f"requests-{os.getpid()}-{secrets.token_hex(3)}.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = logging.handlers.RotatingFileHandler(
                self.path, maxBytes=args.max_bytes, backupCount=args.max_files - 1, encoding="utf-8"
            )
        except OSError as error:
            raise ConfigError(f"request_log.directory cannot be written to: {error}", "request_log.directory") from error
        file.setFormatter(_Lines(args))
        waiting: queue.Queue[Any] = queue.Queue(_QUEUED)
        self._queue, self._listener = _Queue(waiting), logging.handlers.QueueListener(waiting, file)
        self._file = file
        self._listener.start()

    @property
    def dropped(self) -> int:
        """Records that were not written because the writer was behind."""
        return self._queue.dropped

    def put(self, seen: Observed) -> None:
        self._queue.handle(logging.LogRecord("cb_ray.requests", logging.INFO, "", 0, seen, None, None))

    def close(self) -> None:
        """Write what waits, and stop."""
        self._listener.stop()
        self._file.close()
        if self.dropped:
            logger.warning("%d requests were not recorded: the disk was too slow", self.dropped)
