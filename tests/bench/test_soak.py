"""`cb-ray bench soak`: its mix, its reckoning of drift, and a short run against a scripted server."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cb_ray.bench import soak
from cb_ray.bench.soak import Memory, mixed, parse_mix
from cb_ray.errors import ConfigError
from tests.bench.fake_server import serving_beside, well


def test_the_mix_is_as_asked_and_repeats_by_seed() -> None:
    """Shares hold, every kind asks what it is named after, and no prompt comes twice."""
    kinds: list[str] = []
    items = list(islice(mixed(parse_mix("stream=1,whole=1,tools=1,json=1,leave=2"), 3, kinds), 600))
    assert items == list(islice(mixed(parse_mix("stream=1,whole=1,tools=1,json=1,leave=2"), 3, []), 600))
    shares = Counter(kinds)
    assert 160 < shares["leave"] < 240 and all(60 < shares[kind] < 140 for kind in ("stream", "whole", "tools", "json"))
    assert len({str(item.messages) for item in items}) == 600
    for kind, item in zip(kinds, items, strict=True):
        assert item.stream is (kind != "whole")
        assert ("tools" in item.extra) is (kind == "tools") and ("response_format" in item.extra) is (kind == "json")
        assert (item.leave_after is not None) is (kind == "leave")


@pytest.mark.parametrize("text", ["", "chat=1", "stream", "stream=0", "stream=-1", "stream=x"])
def test_a_wrong_mix_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match="mix"):
        parse_mix(text)


def test_drift_is_reckoned_after_warming_up() -> None:
    """Growth before counts for nothing; one odd sample at the end does not make a leak; too few samples make no claim."""
    times = [float(second) for second in range(120)]
    settled = Memory("x", times, [min(1000, 100 + 45 * second) for second in range(120)])
    assert settled.drift(20) == 0 and (settled.drift(0) or 0) > 0.5
    assert Memory("x", times, [1000] * 119 + [5000]).drift(20) == 0
    leaking = Memory("x", times, [1000 + second for second in range(120)])
    assert leaking.drift(20) == pytest.approx(80 / 1029.5)
    assert Memory("x", times[:4], [1] * 4).drift(0) is None


@pytest.mark.parametrize("breaks", [False, True])
def test_a_short_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str], breaks: bool) -> None:
    """This process is the server and is watched; a failing kind fails the run and is named with what the server said."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if breaks and "tools" in body:
            return web.json_response({"error": {"message": "no tools today"}}, status=400)
        return await well(request, body)

    results, figure = tmp_path / "soak.json", tmp_path / "soak.svg"
    # a process named by its exact title, so that no other on this machine fits
    title = " ".join(Path(f"/proc/{os.getpid()}/cmdline").read_bytes().decode().split("\0")).strip()
    arguments = ["--minutes", "0.02", "--every", "0.05", "--warm-up", "0", "--limit", "10", "--mix", "stream=1,tools=1,leave=1"]
    arguments += ["--processes", f"^{soak.re.escape(title)}$", "--json", str(results), "--plot", str(figure)]
    with serving_beside(answer) as url:
        status = soak.main(["--base-url", url, *arguments])
    result = json.loads(results.read_text())
    assert status == (1 if breaks else 0), result["outcomes"]
    assert {os.getpid()} == {process["pid"] for process in result["processes"]}
    assert len(result["processes"][0]["rss"]) >= 5 and figure.exists()
    out = capsys.readouterr().out
    assert set(result["outcomes"]) == {"stream", "tools", "leave"} and set(result["outcomes"]["stream"]) == {"whole"}
    assert ("no tools today" in out) is breaks and (set(result["outcomes"]["tools"]) == {"400"}) is breaks
