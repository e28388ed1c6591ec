"""Request logs in the forms that other load generators read: Mooncake's traces and guidellm's datasets. Owns `export`.

FILE.mooncake.jsonl   timestamp (ms), input_length, output_length, hash_ids (one per block of 512 tokens, the partial one too)
FILE.guidellm.jsonl   prompt_tokens_count, output_tokens_count, and prompt where the log holds token ids and a tokenizer is given
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..errors import ConfigError
from ..request_log import LoggedRequest
from ..simulation.traces import MOONCAKE_BLOCK

FORMS = ("mooncake", "guidellm")


def export(logged: Sequence[LoggedRequest], form: str, path: Path, decode: Callable[[Sequence[int]], str] | None = None) -> None:
    """Write the requests that were served. Raises ConfigError for a form that does not exist, or pages that do not fit into blocks."""
    if form not in FORMS:
        raise ConfigError(f"a log can be exported as {' or '.join(FORMS)}, got {form!r}", "export")
    served = [one for one in logged if one.num_answer]
    rows = _mooncake(served) if form == "mooncake" else _guidellm(served, decode)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _mooncake(served: Sequence[LoggedRequest]) -> Iterable[dict[str, object]]:
    ids: dict[bytes, int] = {}
    for number, one in enumerate(served):
        blocks = list(one.page_names(MOONCAKE_BLOCK))
        if one.num_prompt % MOONCAKE_BLOCK:
            blocks.append(b"partial %d" % number)  # nobody can share it
        yield {
            "timestamp": round((one.at_s - served[0].at_s) * 1000),
            "input_length": one.num_prompt,
            "output_length": one.num_answer,
            "hash_ids": [ids.setdefault(block, len(ids)) for block in blocks],
        }


def _guidellm(served: Sequence[LoggedRequest], decode: Callable[[Sequence[int]], str] | None) -> Iterable[dict[str, object]]:
    for one in served:
        text = {"prompt": decode(one.token_ids)} if decode is not None and one.token_ids else {}
        at_s = round(one.at_s - served[0].at_s, 4)
        trace = {"timestamp": at_s, "input_length": one.num_prompt, "output_length": one.num_answer}
        yield {**text, **trace, "prompt_tokens_count": one.num_prompt, "output_tokens_count": one.num_answer}
