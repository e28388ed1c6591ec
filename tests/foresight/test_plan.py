"""`cb-ray plan`: from a workload and a promise to a pool, on the terminal, as JSON and as one HTML file."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from cb_ray.cli import main

COSTS = "step_s=0.01,query_s=2e-4"
WORK = "requests=150,rate=6,documents=6,document_tokens=512,prompt_tokens=60,answer_tokens=30"
POOL = ["--costs", COSTS, "--page-size", "64", "--cache-tokens", "4096", "--max-batch-tokens", "512"]


def test_the_smallest_pool_that_keeps_the_promise(tmp_path, capsys):
    """One replica is too few, the answer keeps the promise, one less would not, and the advice can be pasted."""
    out = tmp_path / "plan.json"
    assert main(["plan", "size", WORK, *POOL, "--speed", "4", "--replicas", "1", "--ttft", "0.2", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    fixed = {
        trial["plan"]["replicas"]: trial["summary"]["meets_slo"] for trial in found["trials"] if not trial["plan"]["scaling"]
    }
    best = min(count for count, kept in fixed.items() if kept)
    assert best > 1 and fixed[best - 1] is False
    assert found["pool"]["max_replicas"] >= best and found["max_queue_size"] >= 1
    assert f"max_queue_size: {found['max_queue_size']}" in capsys.readouterr().out


def test_a_promise_that_cannot_be_kept_is_said_to_be(capsys):
    """No number of replicas makes a step faster: exit status 1, and the bound that was tried."""
    assert main(["plan", "size", WORK, *POOL, "--ttft", "0.001", "--most", "2"]) == 1
    assert "no pool of up to 2 replicas" in capsys.readouterr().out


def test_policies_side_by_side(tmp_path, capsys):
    """All policies and the oracle, the ratio of prefixes to caches, and a page that holds its figures itself."""
    page, out = tmp_path / "c.html", tmp_path / "c.json"
    arguments = ["plan", "compare", WORK, *POOL, "--replicas", "3", "--html", str(page), "--json", str(out)]
    assert main(arguments) == 0
    found = json.loads(out.read_text())
    rates = {trial["label"]: trial["summary"]["hit_rate"] for trial in found["trials"]}
    assert set(rates) == {"prefix_aware", "least_work", "power_of_two", "round_robin", "oracle"}
    assert rates["prefix_aware"] > rates["round_robin"]
    assert found["prefixes"]["ratio"] in capsys.readouterr().out
    text = page.read_text()
    assert "<svg" in text and "src=" not in text and 'href="http' not in text
    HTMLParser().feed(text)


def test_an_overload_is_laid_beside_a_calm_load(tmp_path, capsys):
    """Capacity first, then nine tenths and three times of it; both promises hold, or the exit status says that one does not."""
    out = tmp_path / "o.json"
    work = "requests=300,prompt_tokens=256,answer_tokens=40"
    arguments = ["plan", "overload", work, *POOL, "--max-requests", "8", "--max-queue-size", "4", "--json", str(out)]
    status = main(arguments)
    found, said = json.loads(out.read_text()), capsys.readouterr().out
    assert found["capacity_per_s"] > 1 and set(found["runs"]) == {"0.9×", "3×"}
    assert found["runs"]["3×"]["refusals"] > found["runs"]["0.9×"]["refusals"]
    assert said.count("HOLDS") + said.count("FAILS") == 2 and status == int("FAILS" in said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.jsonl", "--costs", COSTS], "no workload 'nowhere.jsonl'"),
        (["requets=3", "--costs", COSTS], "requests"),
        ([WORK, "--costs", "step=1"], "step_s"),
        ([WORK, "--costs", COSTS, "--share", "2"], "between 0 and 1"),
    ],
)
def test_what_cannot_be_understood_is_named(arguments, said, capsys):
    """Exit status 1 and one line that says what to change."""
    assert main(["plan", "size", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_costs_from_a_step_log(tmp_path, capsys):
    """What engines wrote becomes the file that plans take."""
    log, out = tmp_path / "steps-1.jsonl", tmp_path / "costs.json"
    lines = [{"query": n, "samples": n, "kv": 50 * n, "pairs": 0, "s": 0.01 + n * 1e-4} for n in range(1, 80)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["plan", "fit", str(tmp_path), "--out", str(out)]) == 0
    assert "relative error" in capsys.readouterr().out
    assert main(["plan", "size", WORK, "--costs", str(out), "--ttft", "5", "--no-scaling"]) == 0
    assert main(["plan", "fit"]) == 1
