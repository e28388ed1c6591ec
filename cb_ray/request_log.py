"""One request as a door has recorded it: the line of a request log, and how it is read again. Owns `LoggedRequest`, `read_log`.

A line of JSON for each request. Prompts are token ids, or (the default) salted digests of their pages, which say what is equal and
nothing else; text is never there. Written by `serving/recording.py`; read by `cb-ray plan` and `cb-ray replay`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .digests import page_digests
from .errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """Times are seconds; `at_s` of the wall clock. `outcome`: stop, length, or the name of the error that ended it."""

    at_s: float
    request_id: str
    num_prompt: int
    num_answer: int
    outcome: str
    page_size: int
    pages: tuple[str, ...] = ()  # salted digests of the prompt's full pages, in hexadecimal; empty where there are token ids
    token_ids: tuple[int, ...] = ()
    answer_ids: tuple[int, ...] = ()
    num_cached: int = 0
    ttft_s: float | None = None
    e2e_s: float | None = None
    max_new_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what differs from the defaults
    priority: int = 0
    session: str = ""  # salted

    def as_line(self) -> str:
        """One line of JSON, without what is empty."""
        return json.dumps(
            {name: value for name, value in asdict(self).items() if value not in ((), {}, "", None)}, separators=(",", ":")
        )

    @classmethod
    def from_line(cls, line: str) -> LoggedRequest:
        """Raises ValueError, KeyError or TypeError for a line of another form."""
        found = json.loads(line)
        for name in ("pages", "token_ids", "answer_ids"):
            found[name] = tuple(found.get(name, ()))
        known = {spec.name for spec in fields(cls)}
        return cls(**{name: value for name, value in found.items() if name in known})

    def page_names(self, page_size: int) -> tuple[bytes, ...]:
        """Names of the prompt's full pages of `page_size` tokens, which must be a multiple of the log's own."""
        if self.token_ids:
            return page_digests(self.token_ids, page_size)
        if page_size % self.page_size:
            raise ConfigError(
                f"this log names pages of {self.page_size} tokens; page_size must be a multiple, got {page_size}", "page_size"
            )
        every = page_size // self.page_size
        return tuple([bytes.fromhex(page) for page in self.pages[every - 1 :: every]])


def log_files(path: str | Path) -> list[Path]:
    """The request logs that a file or a directory stands for, oldest first. Raises ConfigError when there is none."""
    where = Path(path).expanduser()
    found = sorted(where.glob("requests-*.jsonl*"), key=lambda file: file.stat().st_mtime) if where.is_dir() else [where]
    if not found or not all(file.exists() for file in found):
        raise ConfigError(f"there is no request log at {where}", "log")
    return found


def read_log(path: str | Path) -> Iterator[LoggedRequest]:
    """Line by line. Raises ConfigError, naming the line, where one is not of this form."""
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield LoggedRequest.from_line(line)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"line {number} of {path} is no line of a request log: {error!r}", "log") from error
