"""The page about the engine's settings, made of the config itself: the source of `docs/configuration.md`.

python -m tests.config_page > docs/configuration.md
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path

from cb_ray.config import RULES, SCHEDULER_TYPES, ContinuousBatchingConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

HEAD = """# Configuration

`ContinuousBatchingConfig` has the fields of transformers' class of this name, with its defaults; an object of transformers' own
class, or a dictionary, is as good. `None` means that the engine decides, once, when it is built: `manager.facts` holds what it
decided, and `manager.facts.explain()` where the memory goes. Objects that are handed over are never changed. A value that is out of
range, of the wrong type or under an unknown name is a `ConfigError` (a `ValueError`) that names the field.

In an application's YAML the same names stand under `engine:`.

| field | default | allowed | meaning |
| --- | --- | --- | --- |
"""

TAIL = """
Deprecated, with a warning: `block_size` (now `page_size`), `use_default_compile_configs` (now `default_compile_level`, 3 or 0) and
`max_cached_graphs` (without effect).
"""


def meanings() -> dict[str, str]:
    """What the comment behind each field says."""
    lines = inspect.getsource(ContinuousBatchingConfig).splitlines()
    found = (re.match(r"    (\w+): .* = .*?  # (.*)$", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def page() -> str:
    """The whole page."""
    allowed = {name: wanted for name, _, wanted in RULES}
    allowed["scheduler_type"] = ", ".join(f"`{name}`" for name in SCHEDULER_TYPES)
    said = meanings()
    rows = [
        f"| `{f.name}` | `{f.default!r}` | {allowed[f.name]} | {said[f.name]} |"
        for f in fields(ContinuousBatchingConfig)
        if f.name in allowed
    ]
    return HEAD + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    sys.stdout.write(page())
