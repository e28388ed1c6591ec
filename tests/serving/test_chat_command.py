"""`cb-ray chat` against a real HTTP server, as a terminal would run it."""

from __future__ import annotations

import io
from typing import Any

import pytest

from cb_ray.cli import main
from cb_ray.errors import QueueFullError
from cb_ray.serving.settings import DoorSettings
from tests.serving.doors import DoorUnderTest, listening, make_door


def chat(door: DoorUnderTest, *arguments: str) -> int:
    with listening(door.app) as url:
        return main(["chat", "--url", f"{url}/v1", *arguments])


def test_one_question_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer goes to standard output alone, so that it can be piped; what it cost goes to standard error."""
    door = make_door(says="Paris, of course")
    assert chat(door, "--temperature", "0", "--max-tokens", "50", "The", "capital?") == 0
    captured = capsys.readouterr()
    assert captured.out == "Paris, of course\n" and "first token after" in captured.err
    (request,) = door.source.requests
    assert request.sampling.temperature == 0 and request.max_new_tokens == 50


def test_a_conversation_remembers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every question is sent with what was said before; the end of input ends it."""
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    door = make_door(says="Yes")
    assert chat(door, "--system", "Be brief") == 0
    first, second = (len(request.token_ids) for request in door.source.requests)
    assert second > first and capsys.readouterr().out.count("Yes") == 2


@pytest.mark.parametrize(
    ("settings", "script", "words"),
    [
        ({"api_keys": ("secret",)}, {}, "401: "),
        ({}, {"fails": QueueFullError(3, 3, 7.0)}, "(again in 7 s)"),
        ({}, {"fails": QueueFullError(3, 3, 7.0), "fails_after": 2}, "waiting"),
    ],
)
def test_what_the_server_refuses_is_told(
    settings: dict[str, Any], script: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refusal, before the answer or in the middle of it, is one line in the server's words and status 1."""
    door = make_door(DoorSettings(**settings), **script)
    assert chat(door, "Hi") == 1
    assert words in capsys.readouterr().err


def test_no_server_and_no_url_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """The two ways to be nowhere."""
    assert main(["chat", "--url", "http://127.0.0.1:9/v1", "Hi"]) == 1
    assert "127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    assert main(["chat", "--url", "127.0.0.1:8000", "Hi"]) == 1
    assert "--url must look like" in capsys.readouterr().err
