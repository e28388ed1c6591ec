"""Workloads from files: Mooncake's JSONL, Azure's CSV, and what our own doors have recorded. Owns `mooncake`, `azure`, `request_log`.

The first two do not say what the tokens are. Mooncake names the blocks of 512 tokens of each prompt, equal names for equal prefixes;
Azure says lengths only, so there every prompt is taken to be unlike all others.
"""

from __future__ import annotations

import calendar
import csv
import json
from collections.abc import Iterable
from pathlib import Path

from ..errors import ConfigError
from ..request_log import log_files, read_log
from .workload import Arrival, Told, Workload

MOONCAKE_BLOCK = 512


def mooncake(path: str | Path, *, page_size: int = MOONCAKE_BLOCK, speed: float = 1.0, limit: int | None = None) -> Workload:
    """One JSON object a line: timestamp (ms), input_length, output_length, hash_ids (one per block of 512 tokens, last one partial).

    `speed` 2 makes everything come twice as fast; `limit` takes the first so many. Raises ConfigError for a page size that does not
    divide 512, or a line that is not of this form.
    """
    if MOONCAKE_BLOCK % page_size:
        raise ConfigError(f"page_size must divide Mooncake's blocks of {MOONCAKE_BLOCK} tokens, got {page_size}", "page_size")
    parts = MOONCAKE_BLOCK // page_size

    def make() -> Iterable[Told]:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number == limit:
                    return
                try:
                    found = json.loads(line)
                    at, length, answer = found["timestamp"], int(found["input_length"]), int(found["output_length"])
                    blocks = found["hash_ids"]
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(f"line {number + 1} of {path} is not of Mooncake's form: {error!r}", "trace") from error
                full = length // page_size
                pages = [(block * parts + part).to_bytes(16) for block in blocks for part in range(parts)][:full]
                yield Told(Arrival(at / 1000 / speed, max(1, length), tuple(pages)), answer)

    return Workload(Path(path).stem, page_size, make, {"trace": Path(path).name, "speed": speed})


def azure(path: str | Path, *, page_size: int = 64, speed: float = 1.0, limit: int | None = None) -> Workload:
    """Columns TIMESTAMP, ContextTokens, GeneratedTokens. Raises ConfigError for a file that is not of this form."""

    def make() -> Iterable[Told]:
        with Path(path).open(encoding="utf-8", newline="") as lines:
            begin: float | None = None
            for number, row in enumerate(csv.DictReader(lines)):
                if number == limit:
                    return
                try:
                    at = _moment(row["TIMESTAMP"])
                    length, answer = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(f"row {number + 1} of {path} is not of Azure's form: {error!r}", "trace") from error
                begin = at if begin is None else begin
                pages = own_pages(number, length // page_size)
                yield Told(Arrival((at - begin) / speed, max(1, length), pages), answer)

    return Workload(Path(path).stem, page_size, make, {"trace": Path(path).name, "speed": speed})


def is_mooncake(path: str | Path) -> bool:
    """Whether the first line of a file of JSON lines is of Mooncake's form."""
    with Path(path).open(encoding="utf-8") as lines:
        return '"hash_ids"' in lines.readline()


def request_log(path: str | Path, *, page_size: int = 64, speed: float = 1.0, limit: int | None = None) -> Workload:
    """What a door has recorded (setting `request_log`): a file, or a directory of them; requests that were served.

    Pages are as the log names them, or named from its token ids; `page_size` must be a multiple of the log's own, and pages are
    the log's own of which each is the last of one. Raises ConfigError.
    """
    files = log_files(path)

    def make() -> Iterable[Told]:
        logged = sorted((one for file in files for one in read_log(file)), key=lambda one: one.at_s)
        begin = logged[0].at_s if logged else 0.0
        served = [one for one in logged if one.num_answer]
        for one in served[:limit]:
            pages = one.page_names(page_size)
            told = Arrival((one.at_s - begin) / speed, one.num_prompt, pages, one.max_new_tokens, one.priority, one.session)
            yield Told(told, one.num_answer)

    return Workload(Path(path).name, page_size, make, {"trace": Path(path).name, "speed": speed})


def own_pages(number: int, count: int) -> tuple[bytes, ...]:
    """Names of pages that nobody else has."""
    head = b"own" + number.to_bytes(9)
    return tuple([head + page.to_bytes(4) for page in range(count)])


def _moment(text: str) -> float:
    """Seconds of `2023-11-16 18:15:46.6805900`, from some origin."""
    date, _, clock = text.strip().partition(" ")
    year, month, day = map(int, date.split("-"))
    hours, minutes, rest = clock.split(":")
    return calendar.timegm((year, month, day, int(hours), int(minutes), 0)) + float(rest)
