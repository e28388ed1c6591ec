"""Other weights for a pool at work, replica by replica: no request fails, no token is older than it may be.

Owns the scenario `weights`. Each version of the model says words of a quarter of the vocabulary of its own, so that every token tells
whose it is; what is said once all replicas have the new weights is laid beside what transformers says with them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .client import Plan, Record
from .failures import ANSWER, PROMPT, Tell, body, settings
from .judge import Outcome, Verdict, percentile, waits
from .load import Load
from .model import BANDS, VOCAB_SIZE, prompt_of, tokens_of, words_model
from .sitting import APP, Sitting, after, ticks

UPDATES = 2
_CLEAR = 1e-3  # between the two best logits, of answers that are compared


@dataclass(frozen=True, slots=True)
class Update:
    """From when to when it ran, by the machine's monotonic clock, and the version that was there afterwards."""

    begin: float
    end: float
    version: int


async def run(sitting: Sitting, streams: int, width: int, layers: int, tell: Tell, done: Callable[[Outcome], None]) -> None:
    """Two updates under full load, one after the other."""
    from ray import serve

    models = [await asyncio.to_thread(words_model, width, layers, seed, seed) for seed in range(UPDATES + 1)]
    numbers = random.Random(7)
    prompts = [prompt_of(numbers, PROMPT) for _ in range(streams)]
    tell(f"{sitting.replicas} replicas start")
    await sitting.deploy({**settings(streams, sitting.replicas), "model": str(models[0])})
    tell("what transformers says with the last weights")
    wanted = await asyncio.to_thread(reference, models[-1], prompts)
    handle: Any = serve.get_app_handle(APP)
    updates: list[Update] = []
    fewest = sitting.replicas

    async def watch() -> None:
        nonlocal fewest
        async for _ in ticks(0.1):
            replicas = (await sitting.snapshot())["replicas"].values()
            fewest = min(fewest, sum(facts["accepting"] for facts in replicas))

    bodies = [body(prompt, ANSWER) for prompt in prompts]
    async with Load.of(Plan(url=sitting.url, bodies=bodies, concurrency=streams, rounds=0)) as load:
        await load.until(lambda heard: heard.started >= streams)
        watcher = asyncio.create_task(watch())
        for model in models[1:]:
            tell(f"weights {len(updates) + 1} of {UPDATES}")
            begin = time.monotonic()
            answer = await handle.update_weights.remote(str(model))
            updates.append(Update(begin, time.monotonic(), answer.version))
            await after(3)
        ended = len(load.records)
        await load.until(lambda heard: len(heard.records) >= ended + 2 * streams)
        watcher.cancel()
        records = await load.stop()
    done(judge(records, updates, wanted, fewest, sitting))


def judge(
    records: Sequence[Record], updates: Sequence[Update], wanted: dict[int, list[int]], fewest: int, sitting: Sitting
) -> Outcome:
    failed = sum(bool(record.error) for record in records)
    whole = [record for record in records if not record.error]
    stale = sum(stale_tokens(record, updates) for record in whole)
    last = [record for record in whole if record.sent > updates[-1].end and record.key in wanted]
    changed = sum(tokens_of(record.text) != wanted[record.key] for record in last)
    row = {
        "requests": len(records),
        "failed": failed,
        "stale tokens": stale,
        "compared with transformers": len(last),
        "different": changed,
        "seconds for an update": max(update.end - update.begin for update in updates),
        "replicas taking requests, at least": fewest,
        "first token p99 s": percentile(waits(records), 0.99),
        "longest pause s": max((record.longest_gap for record in whole), default=0.0),
    }
    verdicts = [
        Verdict(promise="new weights under full load: no request fails", holds=not failed, found=f"{failed} of {len(records)}"),
        Verdict(
            promise="no token is older than it may be, and no page of old weights is used",
            holds=not stale and not changed and bool(last),
            found=f"{stale} stale tokens; {changed} of {len(last)} later answers differ from transformers' with the new weights",
        ),
        Verdict(
            promise="never more than one replica takes no requests",
            holds=fewest >= sitting.replicas - 1,
            found=f"at least {fewest} of {sitting.replicas} took some",
        ),
    ]
    return Outcome(scenario="weights", rows=[row], verdicts=verdicts, settings=sitting.settings)


def stale_tokens(record: Record, updates: Sequence[Update]) -> int:
    """Tokens of weights that are older than those of a token before them, or than those that every replica had when the request was
    sent."""
    newest = sum(update.end < record.sent for update in updates)
    stale = 0
    for token in tokens_of(record.text):
        band = token // (VOCAB_SIZE // BANDS)
        stale += band < newest
        newest = max(newest, band)
    return stale


def reference(model: Path, prompts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Greedy answers by transformers alone, of those prompts whose answers never stand before a near tie."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([list(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = loaded.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, output_logits=True, return_dict_in_generate=True
        )
    best = torch.stack(out.logits).topk(2, dim=-1).values
    margins = (best[..., 0] - best[..., 1]).amin(dim=0)
    answers = out.sequences[:, ids.shape[1] :].tolist()
    return {key: answer for key, answer in enumerate(answers) if margins[key] > _CLEAR}
