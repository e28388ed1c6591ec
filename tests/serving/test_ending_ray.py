"""The end of Ray in a process that lives on, on a real Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("ray")

from cb_ray.serving.ending import shut_down

pytestmark = [pytest.mark.serve, pytest.mark.timeout(200)]


def test_a_process_outlives_its_ray():
    """Garbage that was collected on the routing loop while Ray ended took the whole process with it: status 1, and not a word."""
    story = subprocess.run([sys.executable, "-m", "tests.serving.ending_story"], capture_output=True, text=True, timeout=180)
    assert story.returncode == 0, story.stderr[-3000:]
    assert "alive" in story.stdout


def test_ending_what_never_began():
    """Nothing runs: nothing happens."""
    shut_down()
