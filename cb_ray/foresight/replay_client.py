"""One recorded request sent again over HTTP: token ids in, token ids out, by the door's `/generate`. Owns `Replayed` and `send`.

Where a log holds digests only, tokens are made from them: equal pages become equal tokens, so prefixes are shared as they were.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ..bench.client import EventReader
from ..request_log import LoggedRequest


@dataclass(slots=True, kw_only=True)
class Replayed:
    """What came of it. Times are seconds; `error` is empty for a whole answer."""

    logged: LoggedRequest
    due_s: float
    answer: list[int] = field(default_factory=list[int])
    ttft_s: float | None = None
    e2e_s: float | None = None
    num_cached: int = 0
    refusals: int = 0
    error: str = ""

    @property
    def is_repeatable(self) -> bool:
        """Whether the same tokens must come again: the prompt is known, and chance was nowhere or had a seed."""
        sampling = self.logged.sampling
        fixed = sampling.get("do_sample") is False or sampling.get("temperature") == 0 or sampling.get("seed") is not None
        return bool(self.logged.answer_ids) and fixed and self.logged.outcome in ("stop", "length")

    def first_difference(self) -> int | None:
        """Index of the first token that is not the one recorded; None when all are."""
        then, now = self.logged.answer_ids, self.answer
        common = min(len(then), len(now))
        return next((n for n in range(common) if then[n] != now[n]), None if len(then) == len(now) else common)


def prompt_of(logged: LoggedRequest, vocab_size: int) -> list[int]:
    """The recorded token ids, or as many made ones that share what the digests share."""
    if logged.token_ids:
        return list(logged.token_ids)
    ids: list[int] = []
    for page in logged.pages:
        dice = random.Random(page)
        ids += [dice.randrange(vocab_size) for _ in range(logged.page_size)]
    dice = random.Random(logged.request_id)
    return ids + [dice.randrange(vocab_size) for _ in range(logged.num_prompt - len(ids))]


def body_of(logged: LoggedRequest, vocab_size: int) -> dict[str, Any]:
    """The body for /generate. A made prompt gets the recorded number of tokens, since its end would come anywhere."""
    body: dict[str, Any] = {"token_ids": prompt_of(logged, vocab_size), "stream": True, "priority": logged.priority}
    if logged.token_ids:
        return {**body, "max_new_tokens": logged.max_new_tokens, "sampling": dict(logged.sampling)}
    return {**body, "max_new_tokens": max(1, logged.num_answer), "sampling": {"do_sample": False, "ignore_eos": True}}


async def send(
    session: aiohttp.ClientSession,
    url: str,
    replayed: Replayed,
    *,
    vocab_size: int,
    headers: Mapping[str, str],
    max_returns: int = 0,
) -> None:
    """Send it and fill `replayed` in, whatever happens; refused, come back when told. Raises only when cancelled."""
    loop = asyncio.get_running_loop()
    began, data = loop.time(), json.dumps(body_of(replayed.logged, vocab_size))
    while True:
        try:
            async with session.post(url, data=data, headers={"Content-Type": "application/json", **headers}) as response:
                if response.status != 200:
                    replayed.error = f"{response.status}: {(await response.text())[:200]}"
                    replayed.refusals += response.status == 429
                    wait = response.headers.get("Retry-After")
                    if response.status != 429 or wait is None or replayed.refusals > max_returns:
                        return
                else:
                    await _read(response, replayed, began)
                    return
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            replayed.error = f"{type(error).__name__}: {error}"
            return
        await until(loop.time() + float(wait))


async def _read(response: aiohttp.ClientResponse, replayed: Replayed, began: float) -> None:
    loop, reader = asyncio.get_running_loop(), EventReader()
    replayed.error = "cut off"
    async for piece in response.content.iter_any():
        for data in reader.feed(piece):
            if data == b"[DONE]":
                replayed.error = "" if replayed.error == "cut off" else replayed.error
                continue
            event = json.loads(data)
            if "error" in event:
                replayed.error = str(event["error"])
                continue
            if event.get("usage"):
                replayed.num_cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            for choice in event["choices"]:
                if choice["token_ids"] and replayed.ttft_s is None:
                    replayed.ttft_s = loop.time() - began
                replayed.answer += choice["token_ids"]
    replayed.e2e_s = loop.time() - began


async def until(at: float) -> None:
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    timer = loop.call_at(at, lambda: over.done() or over.set_result(None))
    try:
        await over
    finally:
        timer.cancel()
