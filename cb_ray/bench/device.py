"""Tokens per second of random models of known shapes, by batch: on a GPU, beside transformers' own continuous batching.

    cb-ray bench device --shapes 0.6b 8b --batches 1 32 128 256

Owns the measurement only. The roof is what the device's memory gives to a large copy in the same run; a decode step cannot be faster
than reading every weight and every cached key and value once. Host time is what planning, packing, launching and committing take a
step, with the wait for the device left out. `whole` counts prompts too, and is what transformers is measured by.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..config import ContinuousBatchingConfig
from ..messages import GenerateRequest, SamplingParams

_COMMON = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": _COMMON
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": _COMMON
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row of the table."""

    shape: str
    batch: int
    way: str
    decode_tokens_per_s: float
    step_ms: float
    host_us: float  # a step
    roof_share: float
    whole_tokens_per_s: float
    peer_tokens_per_s: float | None = None
    peer_error: str = ""


def make_model(shape: str, device: torch.device, dtype: torch.dtype) -> Any:
    """A random model of the Qwen3 family, made on the device."""
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

    maker: Any = AutoModelForCausalLM
    config = Qwen3Config(**SHAPES[shape], bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        torch.manual_seed(0)
        model = maker.from_config(config, dtype=dtype).eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    return model


def copy_bandwidth(device: torch.device, size: int, rounds: int = 5) -> float:
    """Bytes per second, read and written, of copying `size` bytes; the best of `rounds`."""
    source = torch.zeros(size // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(rounds):
        _wait(device)
        begin = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = max(best, 2 * size / (time.perf_counter() - begin))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _prompts(batch: int, context: int, vocab: int) -> list[list[int]]:
    return [[(i * 7919 + j * 31 + 5) % vocab for j in range(context)] for i in range(batch)]


def measure(
    model: Any, shape: str, batch: int, context: int, steps: int, roof: float, settings: dict[str, Any] | None = None
) -> Measured:
    """`batch` requests of `context` tokens that generate `steps` each."""
    from ..engine.build import build

    wish = ContinuousBatchingConfig.of({"max_requests_per_batch": batch, "allow_block_sharing": False} | (settings or {}))
    parts = build(model, model.generation_config, wish)
    core, runner = parts.core, parts.runner
    runner.install()
    tickets: deque[Any] = deque()
    turns: list[tuple[float, float]] = []  # of steps in which everyone decodes: whole seconds, seconds of waiting
    try:
        runner.warmup()
        for index, ids in enumerate(_prompts(batch, context, parts.limits.vocab_size)):
            sampling = SamplingParams(do_sample=False)
            core.add(GenerateRequest(request_id=str(index), token_ids=tuple(ids), max_new_tokens=steps, sampling=sampling), 0.0)
        begin = time.perf_counter()
        while core.has_work or tickets:
            turn, waited = time.perf_counter(), 0.0
            plan = core.plan(0.0)
            if not plan.is_empty:
                tickets.append(runner.submit(plan))
            if tickets and (len(tickets) == runner.depth or plan.is_empty):
                ticket = tickets.popleft()
                waiting = time.perf_counter()
                result = runner.collect(ticket)
                waited = time.perf_counter() - waiting
                core.commit(ticket.plan, result, 0.0)
                core.take_chunks()
            if plan.is_decode and len(plan.rows) == batch:
                turns.append((time.perf_counter() - turn, waited))
        whole = time.perf_counter() - begin
    finally:
        runner.close()
    step = statistics.median(total for total, _ in turns)
    head: Any = model.get_input_embeddings()
    tied = bool(model.config.tie_word_embeddings)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    weights -= 0 if tied else head.weight.numel() * head.weight.element_size()  # of the table a step reads a row a token
    per_token = parts.facts.cache_bytes // max(1, (parts.facts.num_blocks + 1) * parts.facts.page_size)
    read = weights + batch * (context + steps / 2) * per_token
    return Measured(
        shape=shape,
        batch=batch,
        way=parts.summary.split(", ")[2] if parts.summary.count(", ") > 2 else parts.summary,
        decode_tokens_per_s=batch / step,
        step_ms=step * 1e3,
        host_us=1e6 * statistics.median(total - waited for total, waited in turns),
        roof_share=read / step / roof,
        whole_tokens_per_s=batch * steps / whole,
    )


def measure_peer(model: Any, batch: int, context: int, steps: int) -> tuple[float | None, str]:
    """Tokens per second of transformers' own batching over the same requests, after one round that warms up; or what it raised."""
    from transformers import ContinuousBatchingConfig as Theirs
    from transformers import GenerationConfig

    settings = GenerationConfig(do_sample=False, max_new_tokens=steps, eos_token_id=-1, pad_token_id=0)
    prompts = _prompts(batch, context, model.config.vocab_size)
    try:
        with model.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=Theirs(max_requests_per_batch=batch), warmup=True
        ) as manager:
            seconds = 0.0
            for _ in range(2):
                begin = time.perf_counter()
                names = manager.add_requests(prompts, max_new_tokens=steps)
                done = 0
                while done < len(names):
                    output = manager.get_result(timeout=60)
                    if output is None:
                        raise RuntimeError("no result within 60 s")
                    if output.error:
                        raise RuntimeError(output.error)
                    done += output.is_finished()
                seconds = time.perf_counter() - begin
        return batch * steps / seconds, ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cb-ray bench device", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6b", "8b"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128, 256], metavar="N")
    parser.add_argument("--context", type=int, default=256, metavar="TOKENS", help="of each prompt")
    parser.add_argument("--steps", type=int, default=128, metavar="TOKENS", help="that each request generates")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the engine, as JSON values")
    parser.add_argument("--json", action="store_true", help="one object per row, one a line")
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("cb-ray bench device: torch sees no CUDA device; --device cpu measures the host", file=sys.stderr)
        return 1
    settings = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in given.set)}
    roof = copy_bandwidth(device, 2**30 if device.type == "cuda" else 2**27)
    if not given.json:
        print(f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else 'cpu'}: copies at {roof / 1e9:,.0f} GB/s")
        print("shape  batch  decode tok/s  step ms  host us  of roof  whole tok/s  transformers  times")
    for shape in given.shapes:
        model = make_model(shape, device, getattr(torch, given.dtype))
        for batch in given.batches:
            row = measure(model, shape, batch, given.context, given.steps, roof, settings)
            _release()
            found: dict[str, Any] = asdict(row)
            if not given.no_peer:
                found["peer_tokens_per_s"], found["peer_error"] = measure_peer(model, batch, given.context, given.steps)
                _release()
            print(json.dumps(found) if given.json else _line(found), flush=True)
        del model
        _release()
    return 0


def _line(row: dict[str, Any]) -> str:
    peer = row["peer_tokens_per_s"]
    beside = f"{peer:>13,.0f} {row['whole_tokens_per_s'] / peer:>6.2f}" if peer else f"{row['peer_error'] or '-':>13}"
    return (
        f"{row['shape']:<6}{row['batch']:>6} {row['decode_tokens_per_s']:>13,.0f} {row['step_ms']:>8.2f} {row['host_us']:>8.0f} "
        f"{row['roof_share']:>8.1%} {row['whole_tokens_per_s']:>12,.0f} {beside}"
    )


if __name__ == "__main__":
    sys.exit(main())
