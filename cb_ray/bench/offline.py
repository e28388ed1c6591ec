"""Tokens per second of a fixed workload in one process, through the manager, as a caller of the library sees them.

    cb-ray bench offline --model demo:smollm2-135m --requests 64
    cb-ray bench offline --work work.json          a JSON list of {"prompt_ids": […], "max_tokens": n}

Owns the measurement only. Without `--work` the workload is random: prompts and outputs of mixed lengths from a seed, no end of
sequence, no shared prefixes (or `--shared-prefix N` tokens in common).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm


def random_workload(requests: int, vocab_size: int, shared_prefix: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of 8 to 512 tokens and outputs of 16 to 128, each length log-uniform."""
    numbers = random.Random(seed)
    prefix = [numbers.randrange(vocab_size) for _ in range(shared_prefix)]

    def length(low: int, high: int) -> int:
        return round(low * (high / low) ** numbers.random())

    return [
        {
            "prompt_ids": prefix + [numbers.randrange(vocab_size) for _ in range(length(8, 512))],
            "max_tokens": length(16, 128),
        }
        for _ in range(requests)
    ]


def run_pass(manager: Any, work: Sequence[dict[str, Any]], label: str) -> dict[str, Any]:
    """All requests at once; until the last has ended."""
    begin = time.perf_counter()
    for item in work:
        manager.add_request(item["prompt_ids"], max_new_tokens=item["max_tokens"])
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


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cb-ray bench offline", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="demo:smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--work", type=Path, help="a JSON list of prompts in token ids and output lengths")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--shared-prefix", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--passes", type=int, default=2, help="the first is reported as cold")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="{}", help="JSON of ContinuousBatchingConfig fields")
    given = parser.parse_args(argv)

    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from ..config import ContinuousBatchingConfig
    from ..engine.generate import continuous_batching_context_manager
    from ..engine.model_source import resolve_model

    model = AutoModelForCausalLM.from_pretrained(resolve_model(given.model).path, dtype=getattr(torch, given.dtype))
    if given.work is not None:
        work = json.loads(given.work.read_text(encoding="utf-8"))[: given.requests]
    else:
        work = random_workload(given.requests, model.config.get_text_config().vocab_size, given.shared_prefix, given.seed)
    begin = time.perf_counter()
    with continuous_batching_context_manager(
        model,
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(**json.loads(given.engine)),
    ) as manager:
        started = time.perf_counter() - begin
        passes = [run_pass(manager, work, f"pass {n + 1}") for n in range(given.passes)]
    print(json.dumps({"requests": len(work), "start_s": round(started, 1), "passes": passes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
