"""From a door that records to its log, and from the log to a server, the simulator, and the forms of others."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from cb_ray.cli import main
from cb_ray.errors import QueueFullError
from cb_ray.foresight.replay_client import Replayed, prompt_of
from cb_ray.messages import GenerateRequest, SamplingParams
from cb_ray.request_log import LoggedRequest, log_files, read_log
from cb_ray.serving.args import RequestLogArgs, parse_args
from cb_ray.serving.http import build_http_app
from cb_ray.serving.recording import Observed, RecordingSource, RequestRecorder, recorded
from tests.serving.doors import FakeSource, listening, make_model

GREEDY = SamplingParams(do_sample=False)


def asked(number: int, tokens: int = 10, **more: Any) -> GenerateRequest:
    return GenerateRequest(request_id=f"q{number}", token_ids=tuple(range(5, 5 + tokens)), sampling=GREEDY, **more)


def record(directory: Path, requests: list[GenerateRequest], **args: Any) -> list[LoggedRequest]:
    """What the log holds after `requests` were served one after the other."""
    recorder = RequestRecorder(RequestLogArgs(directory=str(directory), page_size=4, **args))
    source = RecordingSource(FakeSource(codec=make_model().codec), recorder)

    async def serve() -> None:
        for request in requests:
            async for _ in source.generate(request):
                pass

    asyncio.run(serve())
    recorder.close()
    return [one for file in log_files(directory) for one in read_log(file)]


def test_what_is_recorded_says_what_is_equal_and_nothing_else(tmp_path):
    """By default: lengths, times, sampling, and salted names of pages. No token, no text, no session."""
    one, two = record(tmp_path, [asked(1), asked(2, tokens=9, session="secret")], salt="pepper")
    assert one.pages[:2] == two.pages[:2] and len(one.pages) == 2 and one.num_prompt == 10
    assert one.outcome == "stop" and one.num_answer > 0 and 0 < (one.ttft_s or 0) <= (one.e2e_s or 0)
    text = next(iter(tmp_path.glob("requests-*"))).read_text()
    assert "token_ids" not in text and "answer_ids" not in text and "secret" not in text and "Hello" not in text
    assert two.session and two.sampling == {"do_sample": False}
    (other,) = record(tmp_path / "other", [asked(1)], salt="salt")
    assert other.pages[0] != one.pages[0], "another salt, other names"


def test_refusals_failures_and_those_who_leave_are_recorded(tmp_path):
    """However a request ends there is one line, and the caller sees what it would have seen."""
    recorder = RequestRecorder(RequestLogArgs(directory=str(tmp_path)))
    codec = make_model().codec

    async def story() -> None:
        full = RecordingSource(FakeSource(codec=codec, fails=QueueFullError(3, 3, 1.5)), recorder)
        with pytest.raises(QueueFullError):
            async for _ in full.generate(asked(1)):
                pass
        async with contextlib.aclosing(RecordingSource(FakeSource(codec=codec), recorder).generate(asked(2))) as chunks:
            await anext(chunks)

    asyncio.run(story())
    recorder.close()
    lines = [one for file in log_files(tmp_path) for one in read_log(file)]
    assert [(one.outcome, one.num_answer > 0) for one in lines] == [("QueueFullError", False), ("left", True)]


def test_a_slow_disk_holds_nobody_up(tmp_path):
    """What finds the queue full is dropped and counted; files are rotated, and there are never more than asked for."""
    recorder = RequestRecorder(RequestLogArgs(directory=str(tmp_path), max_bytes=2000, max_files=3))
    recorder._listener.stop()
    for number in range(2100):
        recorder.put(Observed(request=asked(number), at_s=0.0, began=0.0, answer=[1]))
    assert recorder.dropped == 100
    recorder._listener.start()
    recorder.close()
    files = list(tmp_path.glob("requests-*"))
    assert len(files) == 3 and all(file.stat().st_size <= 2200 for file in files)


def test_the_setting_is_checked(tmp_path):
    """Off unless asked for; a directory that cannot be written to and an unknown content are errors that name the setting."""
    assert parse_args({}).request_log is None
    source: Any = object()
    assert recorded(source, None) is source
    with pytest.raises(ValueError, match="request_log.content"):
        parse_args({"request_log": {"directory": "x", "content": "text"}})
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="request_log.directory"):
        RequestRecorder(RequestLogArgs(directory=str(tmp_path / "file" / "below")))


@pytest.fixture
def server() -> Iterator[str]:
    """A real door on a port, which says "Hello, 🎉 world"."""
    model = make_model()
    with listening(build_http_app(model, FakeSource(codec=model.codec))) as url:
        yield url


def test_a_replay_finds_the_same_tokens_and_says_where_they_differ(tmp_path, server, capsys):
    """Against a door that says the same, nothing differs; against a log that was changed, the request and the token are named."""
    record(tmp_path, [asked(n, max_new_tokens=50) for n in range(3)], content="tokens")
    out = tmp_path / "out.json"
    assert main(["replay", str(tmp_path), "--url", server, "--speed", "100", "--diff", "--json", str(out)]) == 0
    assert "3 of 3 answers are the same" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["whole"] == 3 and found["ttft_p99_s"] > 0 and found["logged_ttft_p50_s"] > 0
    (file,) = log_files(tmp_path)
    lines = list(read_log(file))
    lines[1] = replace(lines[1], answer_ids=(*lines[1].answer_ids[:2], 77))
    file.write_text("".join(one.as_line() + "\n" for one in lines))
    assert main(["replay", str(tmp_path), "--url", server, "--diff"]) == 1
    assert "q1: token 2 was 77" in capsys.readouterr().out


def test_digests_are_replayed_as_tokens_that_share_what_was_shared(tmp_path, server, capsys):
    """Nobody knows the prompts, but equal pages become equal tokens, and lengths are kept."""
    one, two = record(tmp_path, [asked(1), asked(2, tokens=13)])
    first, second = prompt_of(one, 60), prompt_of(two, 60)
    assert first[:8] == second[:8] and first[8:] != second[8:10] and (len(first), len(second)) == (10, 13)
    assert main(["replay", str(tmp_path), "--url", server, "--vocab-size", "60"]) == 0
    assert main(["replay", str(tmp_path), "--url", server, "--diff"]) == 1
    assert "no token ids to compare" in capsys.readouterr().err


def test_a_log_is_a_workload(tmp_path, capsys):
    """The simulator replays it, and `cb-ray plan` takes its directory."""
    lines = record(tmp_path, [asked(n, tokens=40) for n in range(5)])
    (file,) = log_files(tmp_path)
    file.write_text("".join(replace(one, at_s=float(n)).as_line() + "\n" for n, one in enumerate(lines)))
    costs = ["--costs", "step_s=0.01,query_s=1e-4", "--page-size", "8"]
    assert main(["replay", str(tmp_path), *costs]) == 0
    assert main(["plan", "size", str(tmp_path), *costs, "--ttft", "1", "--no-scaling"]) == 0
    assert "64.0%" in capsys.readouterr().out, "four of five prompts find 32 of their 40 tokens"
    assert main(["replay", str(tmp_path), "--costs", "step_s=1,query_s=0", "--page-size", "6"]) == 1
    assert "must be a multiple" in capsys.readouterr().err


def test_a_log_in_the_forms_of_others(tmp_path):
    """Mooncake's, which our own planner reads again, and guidellm's."""
    logged = [
        LoggedRequest(
            at_s=100.0 + n,
            request_id=f"q{n}",
            num_prompt=1100,
            num_answer=7,
            outcome="stop",
            page_size=512,
            pages=("aa", f"b{n}"),
        )
        for n in range(2)
    ]
    log = tmp_path / "requests-1.jsonl"
    log.write_text("".join(one.as_line() + "\n" for one in logged))
    assert main(["replay", str(log), "--export", "mooncake", str(tmp_path / "m.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert rows[1]["timestamp"] == 1000 and [row["hash_ids"] for row in rows] == [[0, 1, 2], [0, 3, 4]]
    assert main(["replay", str(log), "--export", "guidellm", str(tmp_path / "g.jsonl")]) == 0
    assert json.loads((tmp_path / "g.jsonl").read_text().splitlines()[1]) == {
        "timestamp": 1.0,
        "input_length": 1100,
        "output_length": 7,
        "prompt_tokens_count": 1100,
        "output_tokens_count": 7,
    }


def test_only_what_must_repeat_is_compared():
    """Drawn without a seed, another answer is no difference."""
    free = LoggedRequest(at_s=0, request_id="a", num_prompt=1, num_answer=2, outcome="stop", page_size=4, answer_ids=(1, 2))
    assert not Replayed(logged=free, due_s=0).is_repeatable
    assert Replayed(logged=replace(free, sampling={"seed": 3}), due_s=0).is_repeatable
    assert Replayed(logged=free, due_s=0, answer=[1, 2, 3]).first_difference() == 2
