"""The families of decoders that the acceptance suite knows, and how each is served here: the source of `docs/families.md`.

python -m tests.runtime.families > docs/families.md        (needs the acceptance suite beside the repository)
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

SUITE = Path(__file__).parents[3] / "shared" / "accept" / "engine_parity.py"
TABLE = Path(__file__).parents[2] / "docs" / "families.md"

HEAD = """# Families

How each decoder family of transformers is served, as found by the trial that every engine stands before it serves: tiny random
models, float32, on a CPU. `tests/runtime/test_families.py` holds this table against the code and checks greedy tokens of each family.

- **packed**: all requests of a step in one forward pass, keys and values in pages; chunked prefill, prefix caching, parking.
- **own cache**: row by row, each request with the model's own cache, since its layers keep more than keys and values, or do not go
  through transformers' attention interface. *extend*: chunks on top of the cache; *single*: later tokens of a prompt one at a time;
  *again*: all tokens in every step. Right, and slower; nothing is shared between requests.

A family that is not listed is tried in the same way when its engine is built, and refused by name if no way gives the model's
own logits.

| family | way |
| --- | --- |
"""


@functools.cache
def suite() -> ModuleType:
    """The acceptance suite as a module."""
    spec = importlib.util.spec_from_file_location("engine_parity", SUITE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine_parity"] = module
    spec.loader.exec_module(module)
    return module


def build(name: str) -> torch.nn.Module:
    """A tiny random model of a family, or of one of its variants (`phi3:longrope`)."""
    return suite().build(name.split(":")[0], suite().FAMILIES[name])


def listed() -> dict[str, str]:
    """The table as it stands in the docs: family → way."""
    if not TABLE.exists():
        return {}
    rows = [line.split("|") for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {cells[1].strip(): cells[2].strip() for cells in rows[2:]}


def shown(way: str) -> str:
    """A way as the table names it: which kernel attends depends on the machine."""
    return "packed" if way.startswith("packed") else way


def main() -> None:
    from cb_ray.engine.ways import find_way

    print(HEAD, end="")
    for name in sorted(suite().FAMILIES):
        print(f"| {name} | {shown(find_way(build(name), page_size=4).name)} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
