"""Traces and descriptions as workloads: what they say is what arrives, and bad lines are named."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from cb_ray.errors import ConfigError
from cb_ray.simulation.oracle import survey
from cb_ray.simulation.synthetic import Description
from cb_ray.simulation.traces import azure, mooncake

from .pools import workload

DATA = Path(__file__).parents[3] / "shared" / "data"
MOONCAKE, AZURE = DATA / "mooncake_conversation_trace.jsonl", DATA / "azure_llm_conv_2023.csv"


def test_mooncake_blocks_become_pages(tmp_path):
    """Equal hash ids are equal pages, at every page size that divides a block; the last, partial block is no page."""
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [4, 9, 11]},
        {"timestamp": 2500, "input_length": 1536, "output_length": 1, "hash_ids": [4, 9, 12]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, two = mooncake(file, page_size=256, speed=2.0)
    assert (one.arrival.at_s, one.arrival.num_tokens, one.num_answer, len(one.arrival.pages)) == (0.0, 1100, 7, 4)
    assert two.arrival.at_s == 1.25 and two.arrival.pages[:4] == one.arrival.pages and len(set(two.arrival.pages)) == 6
    with pytest.raises(ConfigError, match="must divide"):
        mooncake(file, page_size=100)
    file.write_text('{"timestamp": 0}\n')
    with pytest.raises(ConfigError, match="line 1"):
        list(mooncake(file))


def test_azure_rows_become_arrivals(tmp_path):
    """Times count from the first row; nobody shares a page."""
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5000000,130,4\n2023-11-17 00:00:01.0000000,64,9\n"
    )
    one, two = azure(file)
    assert (two.arrival.at_s, two.arrival.num_tokens, two.num_answer) == (1.5, 64, 9)
    assert len(one.arrival.pages) == 2 and not set(one.arrival.pages) & set(two.arrival.pages)


def test_descriptions_say_what_comes():
    """Rate, lengths and the share of the hot document, within what chance allows; unknown names are errors."""
    made = Description.parse(
        {"requests": 4000, "rate": 20, "documents": 9, "document_tokens": 640, "hot": 0.5, "prompt_tokens": 100}
    )
    told = list(made.workload(64))
    assert told[-1].arrival.at_s == pytest.approx(200, rel=0.1)
    assert sum(one.arrival.num_tokens for one in told) / 4000 == pytest.approx(740, rel=0.05)
    hot = sum(one.arrival.pages[0] == (0).to_bytes(16) for one in told) / 4000
    assert hot == pytest.approx(0.5 + 0.5 / 9, abs=0.05)
    assert all(a.arrival.at_s <= b.arrival.at_s for a, b in pairwise(told))
    with pytest.raises(ConfigError, match="document_tokens"):
        Description.parse({"documents_tokens": 3})


def test_a_survey_finds_what_repeats():
    """Three requests about one document: its pages come again, and a cache of one page cannot hold them."""
    found = survey(workload([(1.0, 0, 192, 1)] * 3), 16, 1)
    assert found.working_set == 96 and found.distinct == 96 + 3 * 96
    assert found.repeated == pytest.approx(2 * 96 / (3 * 192)) and found.ceiling == 0.0
    assert survey(workload([(1.0, 0, 192, 1)] * 3), 8192, 2).ceiling == found.repeated
    assert found.ratio() == "6.00 : 1 : 1"


@pytest.mark.skipif(not MOONCAKE.exists(), reason=f"{MOONCAKE} is not here")
def test_the_mooncake_trace_is_read_whole():
    """12,031 requests over an hour, 37 % of whose prompt tokens come again."""
    found = survey(mooncake(MOONCAKE), 512 * 1000, 16)
    assert sum(1 for _ in mooncake(MOONCAKE)) == 12_031
    assert found.repeated == pytest.approx(0.373, abs=0.001) and found.ceiling < found.repeated


@pytest.mark.skipif(not AZURE.exists(), reason=f"{AZURE} is not here")
def test_the_azure_trace_is_read_whole():
    """19,366 requests over an hour."""
    last = list(azure(AZURE))[-1]
    assert 3400 < last.arrival.at_s < 3600
    assert sum(1 for _ in azure(AZURE)) == 19_366
