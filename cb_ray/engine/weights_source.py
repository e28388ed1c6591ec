"""Where new weights come from: a directory, a hub revision, tensors by name, or a callable that gives one of these.

    /models/run-7/step-200     a directory as `save_pretrained` writes it; read file by file, never held in memory whole
    Qwen/Qwen3-0.6B@a1b2c3     a hub id and a revision, fetched into the hub's cache first
    {"lm_head.weight": …}      tensors or arrays, named as `model.state_dict()` names them
    def newest(): return …     called where the weights are needed; must give the same weights each time

Owns reading names, shapes and tensors, and the fingerprint that tells whether two places read the same. Changes no model.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from ..errors import CbRayError, WeightsError
from .model_source import resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable

WeightsSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | PackedWeights | Callable[[], Any]"

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_REVISION = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)@(?P<revision>[\w./-]+)")
# what a config may say differently under the same architecture: where it came from, how it is stored, where answers end
_FREE = {
    *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype", "use_cache"),
    *("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "_attn_implementation_autoset", "tokenizer_class"),
    *(
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "id2label",
        "label2id",
        "problem_type",
        "chunk_size_feed_forward",
    ),
}


class OpenWeights(Protocol):
    """Named tensors that can be read, each as often as wanted. `at_standstill`: reading disturbs a model that runs beside it."""

    at_standstill: bool

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def tensor(self, name: str) -> Tensor: ...


def open_weights(source: WeightsSource, model: PreTrainedModel) -> OpenWeights:
    """What `source` names, opened for `model`: names and shapes are known, tensors not read yet.

    Raises WeightsError when it cannot be had, or is of another architecture.
    """
    if isinstance(source, (Mapping, PackedWeights)):
        return TensorWeights(source)
    if isinstance(source, (str, os.PathLike)):
        return _open_directory(_directory(os.fspath(source)), model)
    if not callable(source):
        raise WeightsError(
            f"weights come from a directory, a hub id with a revision, tensors by name, or a callable; got {type(source).__name__}"
        )
    try:
        given = source()
    except CbRayError:
        raise
    except Exception as error:
        raise WeightsError(f"the callable that was to give the weights raised {type(error).__name__}: {error}") from error
    if callable(given):
        raise WeightsError("the callable gave another callable; it must give a directory, a hub id, or tensors by name")
    return open_weights(given, model)


def describe(source: WeightsSource) -> str:
    """A source in a few words, for logs and people."""
    if isinstance(source, (Mapping, PackedWeights)):
        return f"{len(source)} tensors"
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else getattr(source, "__qualname__", type(source).__name__)


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Tensors as arrays of bytes: what an object store hands out without a copy. Each name: (bytes, dtype, shape)."""

    tensors: dict[str, tuple[np.ndarray, str, tuple[int, ...]]]

    def __len__(self) -> int:
        return len(self.tensors)


def pack_weights(tensors: Mapping[str, Any]) -> PackedWeights:
    """Tensors or arrays by name, made fit for an object store: those on a device come to the host, none on the host is copied."""
    packed: dict[str, tuple[np.ndarray, str, tuple[int, ...]]] = {}
    for name, value in tensors.items():
        tensor = _as_tensor(name, value).detach().cpu().contiguous()
        bits = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8)
        packed[name] = bits, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    return PackedWeights(packed)


class TensorWeights:
    """Tensors or arrays that are in memory."""

    at_standstill = False

    def __init__(self, tensors: Mapping[str, Any] | PackedWeights) -> None:
        self._keep = tensors  # arrays that lie in an object store are given back with their last user
        if isinstance(tensors, PackedWeights):
            self._tensors = {name: _unpacked(*value) for name, value in tensors.tensors.items()}
        else:
            self._tensors = {name: _as_tensor(name, value) for name, value in tensors.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def _as_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if not isinstance(value, np.ndarray):
        raise WeightsError(f"{name} must be a tensor or an array, got {type(value).__name__}")
    try:
        kind = torch.from_numpy(np.empty(0, value.dtype)).dtype
    except TypeError as error:
        raise WeightsError(f"{name}: torch has no type like {value.dtype}") from error
    if not value.size:
        return torch.empty(value.shape, dtype=kind)
    return _over(np.ascontiguousarray(value)).view(kind).view(value.shape)


def _unpacked(bits: np.ndarray, dtype: str, shape: tuple[int, ...]) -> Tensor:
    kind = getattr(torch, dtype)
    return _over(bits).view(kind).view(shape) if bits.size else torch.empty(shape, dtype=kind)


def _over(value: np.ndarray) -> Tensor:
    """The bytes of an array as a tensor over the same memory. Torch would warn of arrays that are read only, as those in an object
    store are; nothing here writes to them.
    """
    memory = (ctypes.c_uint8 * value.nbytes).from_address(value.ctypes.data)
    memory._array = value  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


class FileWeights:
    """The safetensors files of a directory, mapped into memory: a tensor is read when it is asked for and not kept."""

    at_standstill = False

    def __init__(self, files: Mapping[str, Path]) -> None:
        """`files`: in which file each name is. Raises WeightsError for a file that is damaged or lacks a name."""
        self._of = files
        self._open: dict[Path, Any] = {}
        for path in dict.fromkeys(files.values()):
            try:
                self._open[path] = safe_open(path, "pt")
            except Exception as error:
                raise WeightsError(f"{path} cannot be read: {error}") from error
            missing = {name for name, where in files.items() if where == path} - set(self._open[path].keys())
            if missing:
                raise WeightsError(f"{path} lacks {min(missing)}, which the directory's index says it has")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(self._open[path].get_slice(name).get_shape()) for name, path in self._of.items()}

    def tensor(self, name: str) -> Tensor:
        return self._open[self._of[name]].get_tensor(name)


class ConvertedWeights:
    """A directory that only transformers can read for this model: other names, fused experts, other files. Loaded as a second
    model in host memory, while nothing else computes in this process: transformers changes torch's defaults meanwhile.
    """

    at_standstill = True

    def __init__(self, path: Path, model: PreTrainedModel) -> None:
        self._path, self._kind, self._dtype = path, type(model), model.dtype
        self._loaded: TensorWeights | None = None

    def _load(self) -> TensorWeights:
        if self._loaded is None:
            kind: Any = self._kind
            try:
                model, told = kind.from_pretrained(self._path, dtype=self._dtype, output_loading_info=True)
            except Exception as error:
                raise WeightsError(f"{self._path} cannot be loaded: {error}") from error
            for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
                if told.get(what):
                    raise WeightsError(
                        f"{self._path} does not fit the model: {what.replace('_', ' ')} {sorted(map(str, told[what]))[:3]}"
                    )
            self._loaded = TensorWeights(model.state_dict())
        return self._loaded

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._load().shapes()

    def tensor(self, name: str) -> Tensor:
        return self._load().tensor(name)


def fingerprint(weights: OpenWeights, names: Iterable[str]) -> str:
    """A short name for the very numbers of these tensors: equal in all places that read the same weights.

    A sum of each tensor's bits, so it runs at the speed of memory. It reads all of them once, which also brings a directory's
    files into the page cache before the engine has to stand still.
    """
    sums = [(name, str(value.dtype), tuple(value.shape), _sum(value)) for name in names for value in [weights.tensor(name)]]
    return blake2b(repr(sorted(sums)).encode(), digest_size=8).hexdigest()


def _sum(value: Tensor) -> int:
    bits = value.detach().contiguous().view(-1).view(torch.uint8)
    whole = bits.numel() // 8 * 8
    total = int(bits[:whole].view(torch.int64).sum()) if whole and bits.storage_offset() % 8 == 0 else int(bits[:whole].sum())
    return total + int(bits[whole:].sum())


# ---- directories and the hub ------------------------------------------------------------------------------------------------


def _directory(source: str) -> Path:
    """The directory that `source` names on this machine."""
    revision, name = None, source
    if not Path(source).exists() and (found := _REVISION.fullmatch(source)):
        name, revision = found["name"], found["revision"]
    try:
        local = resolve_model(name, progress=False)
    except CbRayError as error:
        raise WeightsError(f"weights from {source!r}: {error}") from error
    if local.is_local:
        return Path(local.path)
    return _fetch(local.path, revision)


def _fetch(repository: str, revision: str | None) -> Path:
    try:
        path = Path(snapshot_download(repository, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
        if not list(path.glob("*.safetensors")):
            path = Path(snapshot_download(repository, revision=revision, allow_patterns=["*.json", "*.bin"]))
    except Exception as error:
        raise WeightsError(f"{repository} at {revision or 'its newest revision'} cannot be fetched: {error}") from error
    return path


def _open_directory(path: Path, model: PreTrainedModel) -> OpenWeights:
    _check_config(path, model)
    files = _safetensors(path)
    if files is not None and files.keys() <= model.state_dict().keys():
        return FileWeights(files)  # otherwise transformers may know what the names mean: experts that are fused, older names
    return ConvertedWeights(path, model)


def _safetensors(path: Path) -> dict[str, Path] | None:
    """In which file each tensor is; None when the directory is stored in another way."""
    if (path / _INDEX).is_file():
        index = json.loads((path / _INDEX).read_text())["weight_map"]
        return {name: path / file for name, file in index.items()}
    if not (path / _SINGLE).is_file():
        return None
    try:
        with safe_open(path / _SINGLE, "pt") as opened:
            names = cast("list[str]", list(opened.keys()))
    except Exception as error:
        raise WeightsError(f"{path / _SINGLE} cannot be read: {error}") from error
    return dict.fromkeys(names, path / _SINGLE)


def _check_config(path: Path, model: PreTrainedModel) -> None:
    """Another architecture can have the same shapes and mean something else."""
    try:
        theirs = AutoConfig.from_pretrained(path).to_dict()
    except Exception as error:
        raise WeightsError(f"{path} has no config that can be read: {error}") from error
    mine: dict[str, Any] = model.config.to_dict()
    for name in sorted((mine.keys() | theirs.keys()) - _FREE):
        if _plain(mine.get(name)) != _plain(theirs.get(name)):
            raise WeightsError(
                f"{path} is another model: its config has {name}={theirs.get(name)!r}, the model that runs has "
                f"{mine.get(name)!r}; start an engine of its own for it"
            )


def _plain(value: Any) -> Any:
    """As it would be after a trip through JSON, without what may differ."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {str(name): _plain(item) for name, item in items if name not in _FREE}
    return json.loads(json.dumps(value, default=str))
