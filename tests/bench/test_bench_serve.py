"""`cb-ray bench serve` as a user calls it, against a scripted server."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cb_ray.bench import serve
from cb_ray.errors import CbRayError, ConfigError
from tests.bench.fake_server import serving_beside, well
from tests.test_house import loaded_by

SMALL = ["--requests", "6", "--prompt", "4:8", "--output", "4:10"]


def test_a_sweep_makes_a_table_a_file_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A point for each rate, all figures in the file, earlier results beside them in the figure."""
    first, second, figure = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "both.svg"
    with serving_beside() as url:
        common = ["--base-url", url, *SMALL, "--slo", "ttft=5,itl=5"]
        assert serve.main([*common, "--rate", "200", "400", "--json", str(first), "--label", "one", "--records"]) == 0
        assert serve.main([*common, "--concurrency", "2", "--json", str(second)]) == 0
        assert serve.main([*common, "--rate", "300", "--plot", str(figure), "--beside", str(first)]) == 0
    swept: dict[str, Any] = json.loads(first.read_text())
    assert (swept["label"], swept["model"], swept["endpoint"]) == ("one", "fake", "chat")
    assert [point["load"] for point in swept["points"]] == [
        {"rate": 200.0, "arrivals": "poisson"},
        {"rate": 400.0, "arrivals": "poisson"},
    ]
    for point in swept["points"]:
        assert point["completed"] == 6 and point["errors"] == {} and point["goodput"]["share"] == 1.0
        assert point["output_tokens"] == sum(record["output_tokens"] for record in point["records"]) > 0
        assert set(point["client"]) == {"lag_s", "cpu_share"}
    assert swept["points"][0]["seed"] != swept["points"][1]["seed"]
    assert json.loads(second.read_text())["points"][0]["load"] == {"concurrency": 2}
    assert figure.read_text().lstrip().startswith("<?xml")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[:1].isdigit()] == ["200.0/s", "400.0/s", "2", "300.0/s"]


def test_no_prompt_is_asked_twice(tmp_path: Path) -> None:
    """Neither warming up nor the point before may put a prompt into the server's cache."""
    seen: list[str] = []

    async def listen(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(body["messages"][0]["content"])
        assert body["ignore_eos"] is True and body["temperature"] == 0
        return await well(request, body)

    with serving_beside(listen) as url:
        serve.main(["--base-url", url, "--requests", "6", "--prompt", "20", "--output", "4", "--rate", "500", "500"])
    assert len(seen) == len(set(seen)) == 2 + 6 + 6


def test_a_file_of_token_ids_goes_to_completions(tmp_path: Path) -> None:
    """The workload of `bench offline`, as it is; shorter than --requests, it is repeated."""
    bodies: list[dict[str, Any]] = []

    async def listen(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        bodies.append(body)
        assert request.path == "/v1/completions" and request.headers["Authorization"] == "Bearer secret"
        return await well(request, body)

    file = tmp_path / "work.json"
    file.write_text(json.dumps([{"prompt_ids": [1, 2], "max_tokens": 4}, {"prompt_ids": [3], "max_tokens": 2}]))
    arguments = [
        "--work",
        str(file),
        "--requests",
        "3",
        "--warm-up",
        "0",
        "--api-key",
        "secret",
        "--body",
        '{"top_p": 0.5}',
        "--eos",
    ]
    with serving_beside(listen) as url:
        assert serve.main(["--base-url", url, *arguments]) == 0
    assert sorted(body["prompt"] for body in bodies) == [[1, 2], [1, 2], [3]], "all are sent at once, so they come in any order"
    assert all(body["top_p"] == 0.5 and "ignore_eos" not in body for body in bodies)


def test_nothing_answered_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status is for scripts: 1 when no request came back whole."""

    async def busy(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "busy"}}, status=429, headers={"Retry-After": "7"})

    with serving_beside(busy) as url:
        assert serve.main(["--base-url", url, *SMALL, "--rate", "500"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1", "--concurrency", "2"], "not both"),
        (["--rate", "0"], "above 0"),
        (["--plot", "figure.bmp"], "svg"),
        (["--slo", "ttfb=1"], "ttft"),
        (["--arrivals", "sometimes"], "arrivals"),
        (["--body", "{"], "JSON"),
    ],
)
def test_a_wrong_command_line_is_said_before_anything_is_sent(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve.main(["--base-url", "http://127.0.0.1:9/v1", *arguments])


def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(CbRayError, match="does not list its models"):
        serve.main(["--base-url", "http://127.0.0.1:9/v1"])


def test_it_needs_neither_torch_nor_ray() -> None:
    """A load client runs anywhere: on a laptop, in a small container beside the cluster."""
    loaded = loaded_by("from cb_ray.bench import serve, load, client, report, workloads, plot, soak")
    assert not loaded & {"torch", "transformers", "ray", "fastapi", "pydantic"}


def test_control_c_reports_what_was_measured(tmp_path: Path) -> None:
    """As from a terminal: a signal in the middle of a run ends it with its table and its file."""

    async def first_only(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["max_tokens"] == 4:
            return await well(request, body)
        process.send_signal(signal.SIGINT)
        await asyncio.Event().wait()
        raise AssertionError

    work, results = tmp_path / "work.json", tmp_path / "out.json"
    work.write_text(json.dumps([{"prompt": "a", "max_tokens": 4}, {"prompt": "b", "max_tokens": 5}] + [{"prompt": "c"}] * 3))
    with serving_beside(first_only) as url:
        command = [sys.executable, "-m", "cb_ray.cli", "bench", "serve", "--base-url", url, "--work", str(work)]
        command += ["--concurrency", "1", "--warm-up", "0", "--json", str(results)]
        told = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children would ignore it
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        signal.signal(signal.SIGINT, told)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, err
    (point,) = json.loads(results.read_text())["points"]
    assert point["unsent"] >= 1 and point["completed"] >= 1
    assert "interrupted" in out
