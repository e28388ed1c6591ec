"""The same requests through another engine: tokens per second of vLLM, of transformers' own continuous batching, and of this one.

    cb-ray bench peers cb_ray --model MODEL_DIR --work work.json --requests 1 8 64 256
    VLLM_VENV/bin/python -P cb_ray/bench/peers.py vllm --model MODEL_DIR --work work.json --requests 1 8 64 256

Owns how each engine is started and fed: token ids in, greedy, no end of sequence, no sharing of prefixes, everything at once. It runs
as a file, too, in an environment that has the other engine and nothing of this package; so it imports neither at its top.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

Work = list[dict[str, Any]]
Engine = Generator[int, Work, None]  # takes requests, gives the tokens it made of them; the first `next` starts it


def run_vllm(given: argparse.Namespace) -> Engine:
    """vLLM's `LLM`, set up by its own defaults."""
    vllm = importlib.import_module("vllm")
    engine = vllm.LLM(
        model=given.model, dtype=given.dtype, max_model_len=2048, enable_prefix_caching=False, **json.loads(given.engine)
    )
    made = 0
    while True:
        work = yield made
        prompts = [{"prompt_token_ids": item["prompt_ids"]} for item in work]
        params = [vllm.SamplingParams(temperature=0, max_tokens=item["max_tokens"], ignore_eos=True) for item in work]
        made = sum(len(output.outputs[0].token_ids) for output in engine.generate(prompts, params, use_tqdm=False))


def run_transformers(given: argparse.Namespace) -> Engine:
    """transformers' `ContinuousBatchingManager`, with pages and steps that suited it best here."""
    generation = importlib.import_module("transformers.generation")
    settings = {"num_blocks": 256, "page_size": 64, "max_batch_tokens": 512, "allow_block_sharing": False}
    config = generation.ContinuousBatchingConfig(**{**settings, **json.loads(given.engine)})
    model = load(given, attn_implementation="sdpa")
    with model.continuous_batching_context_manager(generation_config=greedy(), continuous_batching_config=config) as manager:
        yield from through(manager)


def run_cb_ray(given: argparse.Namespace) -> Engine:
    """This engine, set up by its own defaults."""
    cb_ray = importlib.import_module("cb_ray")
    config = cb_ray.ContinuousBatchingConfig(**{"allow_block_sharing": False, **json.loads(given.engine)})
    with cb_ray.continuous_batching_context_manager(
        load(given), generation_config=greedy(), continuous_batching_config=config
    ) as manager:
        yield from through(manager)


def load(given: argparse.Namespace, **settings: Any) -> Any:
    """The model, by transformers."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    dtype = getattr(torch, given.dtype)
    return transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype, **settings).eval()


def greedy() -> Any:
    """Greedy, to the full length."""
    return importlib.import_module("transformers").GenerationConfig(max_new_tokens=128, do_sample=False, eos_token_id=-1)


def through(manager: Any) -> Engine:
    """All requests into a manager of transformers' interface, all results out of it."""
    made = 0
    while True:
        work = yield made
        missing = {manager.add_request(item["prompt_ids"], max_new_tokens=item["max_tokens"]) for item in work}
        made = 0
        while missing:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                missing.discard(result.request_id)
                made += len(result.generated_tokens)


ENGINES: dict[str, Callable[[argparse.Namespace], Engine]] = {
    "cb_ray": run_cb_ray,
    "transformers": run_transformers,
    "vllm": run_vllm,
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; prints one line of JSON for each number of requests, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="cb-ray bench peers", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("engine_name", choices=ENGINES)
    parser.add_argument("--model", required=True, help="a model directory")
    parser.add_argument("--work", type=Path, required=True, help='a JSON list of {"prompt_ids": […], "max_tokens": n}')
    parser.add_argument("--requests", type=int, nargs="+", default=[64], help="how many of them (default: 64)")
    parser.add_argument("--passes", type=int, default=4, help="of each; the first is the cold one (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine", default="{}", help="JSON of more settings of the engine")
    given = parser.parse_args(argv)
    work: Work = json.loads(given.work.read_text(encoding="utf-8"))
    begin = time.perf_counter()
    engine = ENGINES[given.engine_name](given)
    next(engine)
    start_s = round(time.perf_counter() - begin, 1)
    for count in given.requests:
        rates: list[float] = []
        tokens = 0
        for _ in range(given.passes):
            begin = time.perf_counter()
            tokens = engine.send(work[:count])
            rates.append(round(tokens / (time.perf_counter() - begin), 1))
        warm = sorted(rates[1:]) or rates
        found = {"engine": given.engine_name, "dtype": given.dtype, "requests": count, "tokens": tokens, "start_s": start_s}
        print(json.dumps({**found, "tokens_per_s": rates, "warm_median": warm[len(warm) // 2]}), flush=True)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
