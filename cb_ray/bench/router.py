"""What it costs the Board to decide where a request goes: `routing.pool.Pool` alone, as the actor runs it.

    cb-ray bench router                         64 replicas, prompts of 8192 tokens, every policy, pages of 16 and 64 tokens

Owns the measurement only. A decision is one `acquire`: match the prefix on every replica, price them, grant, keep the books. A
request shares its document's pages with others and ends with pages of its own; hashing them is the caller's work and is shown
beside. Processor time of this thread is taken, which other processes disturb least.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..digests import page_digests
from ..routing.loads import Ask
from ..routing.members import Member
from ..routing.pool import Pool, PoolLimits
from ..routing.replies import Granted

POLICIES = ("prefix_aware", "least_work", "power_of_two", "round_robin")
_TAIL = 192  # tokens of a prompt that are its own
_DOCUMENTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row of the table. Times in milliseconds."""

    policy: str
    replicas: int
    prompt_tokens: int
    page_size: int
    p50_ms: float
    p99_ms: float
    decisions_per_s: float
    hashing_ms: float  # of one prompt, in the caller's process


def measure(policy: str, replicas: int, tokens: int, page_size: int, decisions: int, seed: int = 0) -> Measured:
    """Decisions over a pool that is three quarters full, after as many to warm it up."""
    dice, slots = random.Random(seed), 64
    pool = Pool(PoolLimits(policy=policy, page_size=page_size), seed)
    pool.members(0.0, [Member(replica=f"replica-{n:03d}", slots=slots) for n in range(replicas)])
    shared = max(0, tokens - _TAIL)
    documents = [page_digests([dice.randrange(1 << 15) for _ in range(shared)], page_size) for _ in range(_DOCUMENTS)]
    prompt = [dice.randrange(1 << 15) for _ in range(tokens)]
    begin = time.thread_time()
    page_digests(prompt, page_size)
    hashing = time.thread_time() - begin
    held: list[str] = []
    times: list[float] = []
    for number in range(2 * decisions):
        own = tuple(dice.randbytes(16) for _ in range(_TAIL // page_size))
        digests = dice.choice(documents) + own
        ask = Ask(ticket=f"t{number}", request_id=f"q{number}", num_tokens=tokens, max_new_tokens=256, digests=digests)
        begin = time.thread_time()
        answer = pool.acquire(number * 0.01, ask)
        times.append(time.thread_time() - begin)
        if isinstance(answer, Granted):
            held.append(answer.ticket)
        if len(held) > replicas * slots * 3 // 4:
            pool.release(number * 0.01, held.pop(dice.randrange(len(held))))
    times = sorted(times[decisions:])
    return Measured(
        policy=policy,
        replicas=replicas,
        prompt_tokens=tokens,
        page_size=page_size,
        p50_ms=round(times[len(times) // 2] * 1e3, 4),
        p99_ms=round(times[len(times) * 99 // 100] * 1e3, 4),
        decisions_per_s=round(len(times) / sum(times)),
        hashing_ms=round(hashing * 1e3, 3),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cb-ray bench router", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192, help="length of a prompt (default: %(default)s)")
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--decisions", type=int, default=2000)
    parser.add_argument("--json", action="store_true", help="one line of JSON for each row")
    given = parser.parse_args(argv)
    if not given.json:
        print(f"{'policy':<14}{'page':>6}{'p50 ms':>9}{'p99 ms':>9}{'per second':>12}{'hashing ms':>12}")
    for page_size in given.page_sizes:
        for policy in given.policies:
            row = measure(policy, given.replicas, given.tokens, page_size, given.decisions)
            if given.json:
                print(json.dumps(asdict(row)))
            else:
                print(
                    f"{row.policy:<14}{row.page_size:>6}{row.p50_ms:>9.3f}{row.p99_ms:>9.3f}{row.decisions_per_s:>12}"
                    f"{row.hashing_ms:>12.3f}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
