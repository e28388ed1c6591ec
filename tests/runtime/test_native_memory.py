"""Large pages are a hint: they change nothing but speed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cb_ray.runtime.native import advise_huge_pages


def test_memory_with_large_pages_holds_what_is_written() -> None:
    """Asked before the first write or after it, for a view or the whole."""
    flat = torch.zeros(5 * 2**20)
    advise_huge_pages(flat)
    flat[::1000] = 7.0
    advise_huge_pages(flat[100:])
    assert flat.count_nonzero() == len(flat[::1000]) and float(flat.sum()) == 7.0 * len(flat[::1000])


def test_the_system_is_asked_where_it_can_be() -> None:
    """On a Linux that does not forbid them the answer is yes, for something that holds a large page; else no."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not sys.platform.startswith("linux") or not setting.exists():
        pytest.skip("this system has no transparent huge pages")
    assert advise_huge_pages(torch.zeros(5 * 2**20))
    assert not advise_huge_pages(torch.zeros(100))
