"""The arrows of the house: who may import whom, who may start threads, and what an import may not drag in.

                      roof     serving, bench, foresight, cli, completion
                      3rd      engine      simulation
                      2nd      runtime     text
                      1st      core        routing
                      ground   errors, config, sizing, digests, grammar, messages, request_log, user_cache

Everything is read from the source with `ast`, imports inside functions and under TYPE_CHECKING included: an arrow that is
drawn late is an arrow.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cb_ray"

GROUND = {"errors", "config", "digests", "grammar", "messages", "request_log", "sizing", "user_cache"}
ROOF = {"serving", "bench", "foresight", "cli", "completion"}
MAY_IMPORT = {
    **dict.fromkeys(GROUND, GROUND),
    "core": GROUND | {"core"},
    "routing": GROUND | {"routing"},
    "runtime": GROUND | {"core", "runtime"},
    "text": GROUND | {"text"},
    "engine": GROUND | {"core", "runtime", "engine"},
    "simulation": GROUND | {"core", "routing", "simulation"},
    "serving": GROUND | {"engine", "routing", "text", "serving"},
    "bench": GROUND | {"core", "routing", "runtime", "text", "engine", "simulation", "serving", "bench"},
    "foresight": GROUND | {"core", "routing", "engine", "simulation", "bench", "foresight"},
    "cli": GROUND | {"serving", "bench", "foresight", "cli"},
    "completion": GROUND | {"cli", "completion"},
}
PURE = {"core", "routing", "simulation"}
IMPURE_MODULES = {"torch", "transformers", "ray", "asyncio", "threading", "multiprocessing", "concurrent", "time", "datetime"}
LOCK_FILES = {"engine/mailbox.py", "engine/gates.py"}
BACKS_OFF = {"serving/board_client.py"}  # between attempts to reach a dead actor, whose return nothing announces
LOCKS = {"Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier"}
THIRD_PARTY = {  # what each floor may import from outside the standard library
    **dict.fromkeys(GROUND | PURE, frozenset[str]()),
    "runtime": {"torch", "transformers", "numpy", "tqdm", "flash_attn", "llguidance"},
    "text": {"tokenizers", "transformers", "jinja2"},
    "engine": {
        *("torch", "transformers", "tokenizers", "numpy", "psutil", "tqdm", "gguf", "accelerate"),
        *("safetensors", "huggingface_hub"),
    },
}


@dataclass(frozen=True, slots=True)
class Arrow:
    """One import: `file` (relative to the package) names the absolute module `target` in `line`."""

    file: str
    line: int
    target: str

    @property
    def room(self) -> str:
        return room_of(self.file)

    def __str__(self) -> str:
        return f"cb_ray/{self.file}:{self.line} imports {self.target}"

    @property
    def library(self) -> str:
        return self.target.split(".")[0]


def room_of(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


@cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text(), str(path)) for path in sorted(PACKAGE.rglob("*.py"))}


def names_of(node: ast.AST, file: str) -> Iterator[str]:
    """The absolute module names that an import statement of `file` may load; `from x import y` counts as x and as x.y."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = ("cb_ray", *Path(file).parts[:-1])
            base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))
        yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def arrows() -> list[Arrow]:
    return [
        Arrow(file, node.lineno, name)
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in names_of(node, file)
    ]


def complain(offences: list[str]) -> None:
    assert not offences, "\n".join(dict.fromkeys(offences))


def test_the_reader_sees_every_kind_of_import() -> None:
    """The guard of the guards: relative, absolute and late imports all become absolute names."""
    source = (
        "import a.b\nfrom c import d\ndef f():\n    from ..core import plan\n    from . import loop\n    from .gates import Stop"
    )
    found = [name for node in ast.walk(ast.parse(source)) for name in names_of(node, "engine/manager.py")]
    assert sorted(found) == ["a.b", "c.d", "cb_ray.core.plan", "cb_ray.engine.gates.Stop", "cb_ray.engine.loop"]


def test_every_room_is_on_the_plan() -> None:
    """A new room needs a floor before it can have arrows."""
    complain([f"cb_ray/{file} belongs to no floor" for file in trees() if room_of(file) not in {*MAY_IMPORT, "__init__"}])


def test_arrows_point_down() -> None:
    """Imports inside the package follow the plan; `cb_ray` itself only names its public parts, lazily."""
    complain(
        [
            f"{arrow}, but {arrow.room} may import only {', '.join(sorted(MAY_IMPORT[arrow.room]))}"
            for arrow in arrows()
            if arrow.library == "cb_ray" and arrow.file != "__init__.py"
            if (arrow.target.split(".") + ["__init__"])[1] not in MAY_IMPORT[arrow.room] | {"__init__", "__version__"}
        ]
    )


def test_nobody_imports_the_roof() -> None:
    """Serving is known to serving, the command line and the benchmarks alone; nobody knows the command line. `cb_ray` itself only
    names a public part of it, lazily.
    """
    complain(
        [
            str(arrow)
            for arrow in arrows()
            for roof in ROOF
            if f"{arrow.target}.".startswith(f"cb_ray.{roof}.") and arrow.room not in ROOF and arrow.file != "__init__.py"
        ]
    )


def test_pure_rooms_read_no_clock_and_start_no_thread() -> None:
    """Time and identity come in as arguments, so that the simulator can run the very same code."""
    complain([str(arrow) for arrow in arrows() if arrow.room in PURE and arrow.library in IMPURE_MODULES])


def test_pure_rooms_draw_only_from_a_seed() -> None:
    """Chance comes in as an argument, too: `random.Random(seed)` and nothing else of that module."""
    offences: list[str] = []
    for file, tree in trees().items():
        seeded = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 1}
        for node in ast.walk(tree):
            drawn = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random" and room_of(file) in PURE
            if drawn and (node.attr != "Random" or id(node) not in seeded):
                offences.append(f"cb_ray/{file}:{node.lineno} uses random.{node.attr} without a seed of its own")
    complain(offences + [str(arrow) for arrow in arrows() if arrow.room in PURE and arrow.target.startswith("random.")])


@pytest.mark.parametrize("room", sorted(THIRD_PARTY))
def test_a_room_uses_only_its_own_libraries(room: str) -> None:
    """Below the roof, each floor knows the libraries of its trade: core counts, runtime computes, text tokenizes."""
    known = THIRD_PARTY[room] | sys.stdlib_module_names | {"cb_ray"}
    complain([str(arrow) for arrow in arrows() if arrow.room == room and arrow.library not in known])


def test_every_library_is_declared() -> None:
    """What the package imports stands in pyproject.toml; what only the roof needs may stand in an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = importlib.metadata.packages_distributions()

    def declared(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=;! ]", line)[0].lower().replace("_", "-") for line in requirements}

    base = declared(project["dependencies"])
    everywhere = base | declared([line for lines in extras.values() for line in lines])
    offences: list[str] = []
    for arrow in arrows():
        top = arrow.library
        if top in sys.stdlib_module_names or top == "cb_ray":
            continue
        distributions = {name.lower().replace("_", "-") for name in names.get(top, [top])}
        if not distributions & everywhere:
            offences.append(f"{arrow}, which pyproject.toml does not ask for")
        elif not distributions & (everywhere if arrow.room in ROOF else base | declared(extras["gguf"] + extras["flash"])):
            offences.append(f"{arrow}, which only an extra of the roof brings")
    complain(offences)


def test_locks_live_in_two_files() -> None:
    """Whoever wants to know what can deadlock reads the mailbox and the gates."""
    offences: list[str] = []
    for file, tree in trees().items():
        if file in LOCK_FILES or room_of(file) not in {"core", "routing", "runtime", "text", "engine", "simulation", *GROUND}:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "threading" and node.attr in LOCKS:
                    offences.append(f"cb_ray/{file}:{node.lineno} uses threading.{node.attr}")
            elif isinstance(node, ast.ImportFrom) and node.module == "threading":
                offences += [f"cb_ray/{file}:{node.lineno} imports {a.name}" for a in node.names if a.name in LOCKS]
    complain(offences)


def test_nothing_sleeps() -> None:
    """A wait is a wait for something: an event, a lock, a future. A sleep is a guess."""
    complain(
        [
            f"cb_ray/{file}:{node.lineno} sleeps"
            for file, tree in trees().items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr == "sleep" and file not in BACKS_OFF
        ]
    )


def test_no_environment_variable_is_ours() -> None:
    """Settings are passed by hand. Other people's variables (XDG_CACHE_HOME, MASTER_ADDR) may be read."""
    ours = re.compile(r"CB_?RAY_[A-Z]")
    complain(
        [
            f"cb_ray/{file}:{node.lineno} names {node.value!r}"
            for file, tree in trees().items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and ours.match(node.value)
        ]
    )


def test_every_file_says_what_it_owns() -> None:
    """A file opens with a docstring, and none is called after nothing in particular."""
    offences = [f"cb_ray/{file} has no docstring" for file, tree in trees().items() if not ast.get_docstring(tree)]
    vague = {"utils.py", "helpers.py", "common.py", "misc.py"}
    complain(offences + [f"cb_ray/{file} is named after nothing" for file in trees() if Path(file).name in vague])


def test_the_map_shows_every_room() -> None:
    """`cb_ray/README.md` names each file once, and none that is gone."""
    shown = re.findall(r"^\| `([\w/.]+\.py)` \|", (PACKAGE / "README.md").read_text(), re.MULTILINE)
    there = [file for file in trees() if Path(file).name != "__init__.py"]
    assert sorted(shown) == sorted(there)


def test_no_globals_change() -> None:
    """State has an owner that can be pointed at: no `global` statement anywhere."""
    complain(
        [
            f"cb_ray/{file}:{node.lineno} has a global statement"
            for file, tree in trees().items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Global)
        ]
    )


def loaded_by(statement: str) -> set[str]:
    """The top-level modules in sys.modules of a fresh interpreter after `statement`."""
    script = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_importing_the_pure_rooms_loads_nothing_heavy() -> None:
    """The simulator, and any tool that only plans or routes, starts in milliseconds."""
    loaded = loaded_by("import cb_ray, cb_ray.core, cb_ray.routing, cb_ray.core.engine_core, cb_ray.routing.pool")
    assert not loaded & {"torch", "transformers", "ray", "numpy", "asyncio", "pydantic"}


def test_the_engine_needs_no_ray() -> None:
    """In one process the engine works where Ray is not installed: importing it and its public names loads no ray."""
    loaded = loaded_by("import cb_ray, cb_ray.engine.manager\nfor name in cb_ray.__all__: getattr(cb_ray, name)")
    assert "cb_ray" in loaded
    assert not loaded & {"ray", "fastapi", "pydantic", "starlette"}


def test_public_names_are_complete_and_sorted() -> None:
    """`cb_ray.__all__` is what `dir` shows and what star-import brings, in order."""
    import cb_ray

    assert cb_ray.__all__ == sorted(cb_ray.__all__)
    assert set(cb_ray.__all__) <= set(dir(cb_ray))
    with pytest.raises(AttributeError, match="no attribute 'generate_batches'"):
        _ = cb_ray.generate_batches
