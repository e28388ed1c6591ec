"""A certificate for a model on this machine: does batching ever change an answer?

    cb-ray verify demo:smollm2-135m --dtype float32

Owns the checks and their table. Each check runs the engine under one condition and compares greedy tokens, one by one, with
`model.generate` run prompt by prompt; logprobs with those of a plain forward pass. A difference is shown with its first differing token
and the logit margin there: in low precision a near-tie may fall either way, which is rounding, while a wide margin is a fault.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from ..errors import EngineFailedError

_TIE = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.05}  # margins up to this are ties: steps of rounding in the logits
_PAGE = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the certificate."""

    check: str
    passed: bool
    detail: str


class Certifier:
    """Runs one model under each condition. `tie` is the logit margin up to which a difference is rounding."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], count: int, tie: float) -> None:
        self.model, self.prompts, self.count, self.tie = model, [list(prompt) for prompt in prompts], count, tie
        self._references: dict[tuple[int, ...], list[int]] = {}

    # ---- what is right ----------------------------------------------------------------------------------------------------------

    def reference(self, prompt: Sequence[int]) -> list[int]:
        """Greedy tokens of `model.generate` for one prompt alone."""
        import torch

        key = tuple(prompt)
        if key not in self._references:
            ids = torch.tensor([list(prompt)], device=self.model.device)
            with torch.no_grad():
                output = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=self.count,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            self._references[key] = output[0, len(prompt) :].tolist()
        return self._references[key]

    def logits_after(self, tokens: Sequence[int]) -> Any:
        """Logits [V] of a plain forward pass after `tokens`, float32."""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([list(tokens)], device=self.model.device), use_cache=False).logits[0, -1].float()

    def compare(self, prompt: Sequence[int], found: Sequence[int]) -> str | None:
        """None when `found` is right, or leaves the greedy path at a tie; else what differs."""
        wanted = self.reference(prompt)
        for index, (ours, theirs) in enumerate(zip(found, wanted, strict=False)):
            if ours != theirs:
                logits = self.logits_after([*prompt, *wanted[:index]])
                margin = float(logits[theirs] - logits[ours])
                if abs(margin) <= self.tie:
                    return None
                return f"token {index} of a prompt of {len(prompt)}: got {ours}, generate says {theirs} (margin {margin:.3g})"
        if len(found) != len(wanted):
            return f"a prompt of {len(prompt)}: got {len(found)} tokens, generate gives {len(wanted)}"
        return None

    # ---- running ----------------------------------------------------------------------------------------------------------------

    def run(self, prompts: Sequence[Sequence[int]], children: int = 1, **settings: Any) -> tuple[list[Any], Any]:
        """Outputs in order, and the engine's stats."""
        from transformers import GenerationConfig

        from ..config import ContinuousBatchingConfig
        from ..engine.generate import continuous_batching_context_manager

        wish = ContinuousBatchingConfig(**{"page_size": _PAGE, "max_batch_tokens": 512, **settings})
        # transformers refuses several greedy outputs by that name; the best of one token is the same.
        manner: dict[str, Any] = {"do_sample": False} if children == 1 else {"do_sample": True, "top_k": 1}
        generation = GenerationConfig(max_new_tokens=self.count, eos_token_id=-1, num_return_sequences=children, **manner)
        outputs: dict[str, Any] = {}
        with continuous_batching_context_manager(
            self.model, generation_config=generation, continuous_batching_config=wish
        ) as manager:
            ids = manager.add_requests([list(prompt) for prompt in prompts])
            for _ in range(len(prompts) * children):
                output = manager.get_result()
                if output is None:
                    raise EngineFailedError(str(manager.fatal_error or "the engine stopped"))
                outputs[output.request_id] = output
            stats = manager.stats()
        order = [child for parent in ids for child in [*(f"{parent}__child#{k}" for k in range(children - 1)), parent]]
        return [outputs[name] for name in order], stats

    def check_tokens(self, name: str, prompts: Sequence[Sequence[int]], shown: Callable[[Any], str], **settings: Any) -> Outcome:
        outputs, stats = self.run(prompts, **settings)
        children = settings.get("children", 1)
        asked = [prompt for prompt in prompts for _ in range(children)]
        failed = [output.error for output in outputs if output.error]
        wrong = [text for prompt, out in zip(asked, outputs, strict=True) if (text := self.compare(prompt, out.generated_tokens))]
        problems = failed + wrong
        return Outcome(name, not problems, problems[0] if problems else f"{len(outputs)} outputs equal, {shown(stats)}")

    # ---- the certificate -----------------------------------------------------------------------------------------------------------

    def checks(self) -> Iterator[Callable[[], Outcome]]:
        """Each check, to be run in this order."""
        longest = max(map(len, self.prompts))
        pages = -(-(longest + self.count) // _PAGE)
        shared = [self.prompts[-1][: longest // 2] + prompt for prompt in self.prompts]
        tight: dict[str, Any] = {"num_blocks": 2 * -(-(longest * 3 // 2 + self.count) // _PAGE), "safety_margin": 0.0}

        def preempted(stats: Any) -> str:
            return f"{stats.num_preemptions} preemptions"

        yield lambda: self.check_tokens("alone", self.prompts[:1], lambda s: f"{s.num_steps} steps")
        yield lambda: self.check_tokens("together", self.prompts, lambda s: f"{s.num_steps} steps", allow_block_sharing=False)
        yield lambda: self.check_tokens("prompts in chunks", self.prompts, lambda s: f"{s.num_steps} steps", max_batch_tokens=24)
        yield lambda: self.check_tokens("shared prefixes", shared, lambda s: f"{s.cached_tokens} tokens found cached")
        yield lambda: self.check_tokens(
            "too little memory", self.prompts, preempted, **{**tight, "num_blocks": max(tight["num_blocks"] // 2, pages + 1)}
        )
        yield lambda: self.check_tokens(
            "pages parked on the host", self.prompts, preempted, cpu_offload_space=0.25, allow_block_sharing=False, **tight
        )
        yield lambda: self.check_tokens(
            "several outputs a prompt", self.prompts[:3], lambda s: f"{s.cached_tokens} cached", children=3
        )
        yield self.check_logprobs

    def check_logprobs(self) -> Outcome:
        """Logprobs of the chosen tokens against a plain forward pass."""
        outputs, _ = self.run(self.prompts, return_logprobs=True)
        worst = 0.0
        for prompt, output in zip(self.prompts, outputs, strict=True):
            for index in (0, len(output.generated_tokens) - 1):
                logits = self.logits_after([*prompt, *output.generated_tokens[:index]])
                expected = float(logits.log_softmax(-1)[output.generated_tokens[index]])
                worst = max(worst, abs(expected - output.logprobs[index]))
        return Outcome("logprobs", worst <= max(self.tie, 1e-3), f"largest error {worst:.2g} nats")


def make_prompts(vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Eight prompts of mixed lengths from the whole vocabulary."""
    numbers = random.Random(seed)
    return [[numbers.randrange(min(3, vocab_size - 1), vocab_size) for _ in range(n)] for n in (1, 7, 16, 33, 48, 71, 100, 120)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a hub id, a directory, a .gguf file, or demo:smollm2-135m")
    parser.add_argument("--dtype", choices=sorted(_TIE), default="float32", help="float32 leaves no room for rounding (default)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=12, help="tokens generated per prompt")
    parser.add_argument("--tie", type=float, help="logit margin up to which a difference is rounding; by dtype if not given")


def run(given: argparse.Namespace) -> int:
    """Print the certificate. Returns 0 when every check passed."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..engine.model_source import resolve_model

    path = resolve_model(given.model).path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, given.dtype)).to(given.device).eval()
    tie = _TIE[given.dtype] if given.tie is None else given.tie
    prompts = make_prompts(model.config.get_text_config().vocab_size)
    certifier = Certifier(model, prompts, given.tokens, tie)
    outcomes = [check() for check in tqdm(list(certifier.checks()), desc="verify", unit="check", disable=None)]
    print(f"{given.model}, {given.dtype}, {given.device}: greedy tokens against model.generate, ties up to a margin of {tie:g}\n")
    for outcome in outcomes:
        print(f"{'ok  ' if outcome.passed else 'FAIL'}  {outcome.check:<26} {outcome.detail}")
    failed = sum(not outcome.passed for outcome in outcomes)
    print(f"\n{len(outcomes) - failed} passed, {failed} failed", file=sys.stdout)
    return 1 if failed else 0
