"""`cb-ray bench NAME`: measure the engine, or a server.

Owns the list of benchmarks; each is a module with `main(argv) -> int`, imported when it is asked for.
"""

from __future__ import annotations

import argparse
import importlib

BENCHMARKS = {
    "abuse": "malformed requests and clients that leave, against a running server",
    "attention": "native attention against gathering and torch's own, and against the machine's memory",
    "device": "tokens per second of random models of known shapes on a GPU, by batch, against its memory and transformers",
    "grammar": "what a JSON schema costs in tokens per second, and what requests without one see beside it",
    "kernels": "native products, MLPs and choosing tokens against torch's own",
    "offline": "tokens per second of a workload of token ids, in one process",
    "peers": "the same requests through vLLM, transformers and this engine",
    "pool": "the pool's promises: failover, overload, prefixes, scaling, on real replicas",
    "router": "milliseconds to decide where a request goes, by policy and page size",
    "scheduler": "microseconds to plan and commit a step, by running and waiting requests",
    "serve": "load on any OpenAI-compatible server: throughput, latencies, goodput, refusals",
    "soak": "mixed load for a long time, and whether the server's memory grows",
    "step": "where a step's time goes: planning, the forward pass, committing",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listing = "\n".join(f"  {name:<12}{text}" for name, text in BENCHMARKS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"benchmarks:\n{listing}\n\ncb-ray bench NAME --help tells more."
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(given: argparse.Namespace) -> int:
    return importlib.import_module(f"cb_ray.bench.{given.name}").main(given.rest)
