"""Where flash attention over block tables comes from, and how each source is called. Owns the search and three adapters.

A source is a module of functions whose parameters differ from release to release; what it can do is read off their signatures,
never off a version number. Knows tensors and modules; no cache, no plan.

    flash_attention_3   flash_attn_interface, or kernels-community/vllm-flash-attn3 by the `kernels` loader      Hopper
    flash_attention_2   flash_attn, or kernels-community/flash-attn2 by the `kernels` loader                      Ampere and later
    varlen_attn         torch.nn.attention.varlen, where the installed torch takes a block table                   Ampere and later
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

Tensor = torch.Tensor
NAMES = ("flash_attention_3", "flash_attention_2", "varlen_attn")
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Whose attention a call computes. Row b has queries cu_q[b] … cu_q[b + 1] - 1, which are the last of its kv_lengths[b]
    positions; position p lies in page table[b, p // page].
    """

    cu_q: Tensor  # int32 [B + 1]
    cu_k: Tensor  # int32 [B + 1], sums of kv_lengths
    kv_lengths: Tensor  # int32 [B]
    table: Tensor  # int32 [B, T]
    max_q: int  # at least the longest row's queries
    max_k: int  # at least the longest row's positions


class How(NamedTuple):
    """What a layer asks. `sides`: keys left and right of a query that it sees, itself not counted; -1: all."""

    scale: float
    sides: tuple[int, int]
    softcap: float
    sinks: Tensor | None


class FlashKernels(Protocol):
    """One source of kernels."""

    name: str  # of the backend
    origin: str  # where it was found, for people
    page_multiple: int  # pages hold a multiple of this many tokens
    softcaps: bool
    sinks: bool
    dtypes: tuple[torch.dtype, ...]

    def varlen(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, how: How) -> Tensor:
        """query [Q, heads, d], pages keys and values [blocks, P, kv_heads, d] → [Q, heads, d]."""
        ...

    def decode(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, how: How) -> Tensor:
        """The same for one query a row, [B, heads, d] → [B, heads, d]; long rows are split among processors."""
        ...


@dataclass(frozen=True, slots=True)
class Missing:
    """A source that is not here, and why."""

    name: str
    reason: str


def _accepts(function: Callable[..., Any], *names: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return all(name in parameters for name in names)


def reason_against(name: str, device: torch.device) -> str | None:
    """Why `device` cannot run the kernels of that name; None when it can."""
    if device.type != "cuda":
        return f"it runs on CUDA devices and the model is on {device.type}"
    wanted, family = (9, "Hopper") if name == "flash_attention_3" else (8, "Ampere")
    major, minor = torch.cuda.get_device_capability(device)
    if major < wanted or (wanted == 9 and major > 9):
        return f"it is made for compute capability {wanted}.0 ({family}) and this device has {major}.{minor}"
    return None


class Flash2:
    """The functions of the flash-attn package, version 2."""

    name = "flash_attention_2"
    page_multiple = 256
    sinks = False
    dtypes: tuple[torch.dtype, ...] = _HALF

    def __init__(self, module: Any, origin: str) -> None:
        self.origin = origin
        self._varlen: Callable[..., Any] = module.flash_attn_varlen_func
        self._with_cache: Callable[..., Any] = module.flash_attn_with_kvcache
        if not _accepts(self._varlen, "block_table") or not _accepts(self._with_cache, "block_table"):
            raise ImportError("its functions take no block_table; version 2.5 or later does")
        self.softcaps = _accepts(self._varlen, "softcap") and _accepts(self._with_cache, "softcap")

    def _common(self, rows: Rows, how: How) -> dict[str, Any]:
        given: dict[str, Any] = {"softmax_scale": how.scale, "causal": True, "window_size": how.sides, "block_table": rows.table}
        if how.softcap:
            given["softcap"] = how.softcap
        return given

    def varlen(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, how: How) -> Tensor:
        return self._varlen(query, keys, values, rows.cu_q, rows.cu_k, rows.max_q, rows.max_k, **self._common(rows, how))

    def decode(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, how: How) -> Tensor:
        given = self._common(rows, how)
        return self._with_cache(query[:, None], keys, values, cache_seqlens=rows.kv_lengths, **given)[:, 0]


class Flash3:
    """The functions of flash-attn 3, or of vLLM's build of it on the hub. Chunks of prompts go through the cache function, too."""

    name = "flash_attention_3"
    page_multiple = 1
    dtypes: tuple[torch.dtype, ...] = _HALF

    def __init__(self, module: Any, origin: str) -> None:
        self.origin = origin
        self._with_cache: Callable[..., Any] = module.flash_attn_with_kvcache
        names = [name for name in ("page_table", "block_table") if _accepts(self._with_cache, name)]
        if not names or not _accepts(self._with_cache, "cu_seqlens_q", "max_seqlen_q"):
            raise ImportError("its flash_attn_with_kvcache takes no pages for rows of unequal length")
        self._table_name = names[0]
        self.softcaps = _accepts(self._with_cache, "softcap")
        self._sinks_name = next((name for name in ("s_aux", "learnable_sink") if _accepts(self._with_cache, name)), None)
        self.sinks = self._sinks_name is not None

    def _common(self, rows: Rows, how: How) -> dict[str, Any]:
        given: dict[str, Any] = {"softmax_scale": how.scale, "causal": True, "window_size": how.sides}
        given[self._table_name] = rows.table
        if how.softcap:
            given["softcap"] = how.softcap
        if how.sinks is not None and self._sinks_name is not None:
            given[self._sinks_name] = how.sinks
        return given

    def varlen(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, how: How) -> Tensor:
        given = self._common(rows, how) | {"cu_seqlens_q": rows.cu_q, "max_seqlen_q": rows.max_q}
        return _first(self._with_cache(query, keys, values, cache_seqlens=rows.kv_lengths, **given))

    def decode(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, how: How) -> Tensor:
        given = self._common(rows, how)
        return _first(self._with_cache(query[:, None], keys, values, cache_seqlens=rows.kv_lengths, **given))[:, 0]


class TorchVarlen:
    """`torch.nn.attention.varlen.varlen_attn`, flash attention 2 inside torch: nothing to install."""

    name = "varlen_attn"
    page_multiple = 256
    softcaps = False
    sinks = False
    dtypes: tuple[torch.dtype, ...] = _HALF

    def __init__(self, module: Any, origin: str) -> None:
        self.origin = origin
        self._attend: Callable[..., Any] = module.varlen_attn
        if not _accepts(self._attend, "block_table", "seqused_k", "window_size"):
            raise ImportError("its varlen_attn takes no block_table; a later torch does")
        self._extra = {"enable_gqa": True} if _accepts(self._attend, "enable_gqa") else {}

    def varlen(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, how: How) -> Tensor:
        return self._attend(
            query,
            keys,
            values,
            rows.cu_q,
            rows.cu_k,
            rows.max_q,
            rows.max_k,
            scale=how.scale,
            window_size=how.sides,
            seqused_k=rows.kv_lengths,
            block_table=rows.table,
            **self._extra,
        )

    def decode(self, query: Tensor, keys: Tensor, values: Tensor, rows: Rows, how: How) -> Tensor:
        return self.varlen(query, keys, values, rows, how)


def _first(result: Any) -> Tensor:
    """The output, of functions that may return more."""
    return result[0] if isinstance(result, tuple) else result


def find(name: str) -> FlashKernels | Missing:
    """The kernels of a name in NAMES, from the first place that has them; nothing is downloaded unless `kernels` is installed."""
    reasons: list[str] = []
    for origin, load in _PLACES[name]:
        try:
            return _ADAPTERS[name](load(), origin)
        except Exception as error:  # a package built for another torch raises anything
            reasons.append(f"{origin}: {error}")
    return Missing(name, "; ".join(reasons))


def _package(name: str) -> Callable[[], Any]:
    return lambda: importlib.import_module(name)


def _hub(repository: str, name: str) -> Callable[[], Any]:
    """By the `kernels` loader, at the version that the installed transformers uses."""

    def load() -> Any:
        loader = importlib.import_module("kernels")
        versions = getattr(importlib.import_module("transformers.modeling_flash_attention_utils"), name, {})
        version = versions.get(repository)
        return loader.get_kernel(repository) if version is None else loader.get_kernel(repository, version=version)

    return load


_VERSIONS = "FLASH_ATTN_KERNEL_VERSIONS"
_ADAPTERS: dict[str, Callable[[Any, str], FlashKernels]] = {
    "flash_attention_3": Flash3,
    "flash_attention_2": Flash2,
    "varlen_attn": TorchVarlen,
}
_PLACES: dict[str, tuple[tuple[str, Callable[[], Any]], ...]] = {
    "flash_attention_3": (
        ("flash_attn_interface", _package("flash_attn_interface")),
        ("kernels-community/vllm-flash-attn3", _hub("kernels-community/vllm-flash-attn3", _VERSIONS)),
    ),
    "flash_attention_2": (
        ("flash_attn", _package("flash_attn")),
        ("kernels-community/flash-attn2", _hub("kernels-community/flash-attn2", _VERSIONS)),
    ),
    "varlen_attn": (("torch.nn.attention.varlen", _package("torch.nn.attention.varlen")),),
}
