"""The flash backends: attention over block tables by somebody else's kernels. Owns how a step is divided among their calls.

Nothing is gathered: a call is given the pages as they lie and a table of them. One call for all rows would let a chunk of a prompt,
or one long request, take the decode kernel away from everyone, so each step is divided by what its rows are:

    step        │ d d d d D d │ ppppppppp │ pppp │        d: one token, short; D: one token, long; p: a chunk of a prompt
    decode      │ d d d d   d │                           table of `decode_width` pages
    decode      │         D   │                           table as wide as its longest row
    varlen                    │ ppppppppp │ pppp │        any number of queries a row

All keys and values are stored before any call reads: a row may match a page that another row of the same step fills, which is why the
kernels' own storing is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import flash_kernels
from .attention import Extras, GroupBatch
from .flash_kernels import FlashKernels, How, Missing, Rows
from .inputs import StepInputs
from .kv_cache import LayerPages
from .survey import AttentionSite

_MAX_HEAD_DIM = 256

Index = slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """One call: which of the step's packed queries, as rows of the decode or the varlen kernel. `queries` None: all of them."""

    decode: bool
    queries: Index | None
    rows: Rows


class FlashBackend:
    """Kernels of one name in `flash_kernels.NAMES`, looked for when a model on a fitting device first asks."""

    static = True  # a step of equal shapes is computed by equal calls, whatever its rows are: graphs may capture it

    def __init__(self, name: str, page_size: int) -> None:
        self.name = name
        self._page_size = page_size
        self._kernels: FlashKernels | Missing | None = None

    @property
    def page_multiple(self) -> int:
        return 1 if self._kernels is None or isinstance(self._kernels, Missing) else self._kernels.page_multiple

    def reason_against(self, site: AttentionSite, device: torch.device) -> str | None:
        against = flash_kernels.reason_against(self.name, device)
        if against is not None:
            return against
        if self._kernels is None:
            self._kernels = flash_kernels.find(self.name)
        if isinstance(self._kernels, Missing):
            return self._kernels.reason
        return self._cannot(site, self._kernels)

    def _cannot(self, site: AttentionSite, kernels: FlashKernels) -> str | None:
        layer = f"layer {site.index}"
        if self._page_size % kernels.page_multiple:
            return f"pages of {self._page_size} tokens are asked for, and it wants a multiple of {kernels.page_multiple}"
        if site.dtype not in kernels.dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in kernels.dtypes)
            return f"{layer} computes in {str(site.dtype).removeprefix('torch.')}, and it computes in {names}"
        if site.k_dim != site.v_dim:
            return f"{layer} has keys of {site.k_dim} and values of {site.v_dim} numbers, and it wants them alike"
        if site.k_dim > _MAX_HEAD_DIM or site.k_dim % 8:
            return f"{layer} has heads of {site.k_dim} numbers, and it takes a multiple of 8 up to {_MAX_HEAD_DIM}"
        if site.softcap and not kernels.softcaps:
            return f"{layer} caps its attention logits at {site.softcap:g}, which it cannot"
        if site.has_sinks and not kernels.sinks:
            return f"{layer} has attention sinks, which it cannot have"
        return None

    def prepare(self, inputs: StepInputs, page_size: int, decode_width: int) -> Sequence[tuple[Part, ...]]:
        """The step's calls, for each group."""
        if inputs.fixed or not decode_width:
            parts = [_whole(inputs, page_size, decode=bool(decode_width) and inputs.ids.shape[0] == inputs.starts.shape[0])]
        else:
            parts = _divided(inputs, page_size, decode_width)
        return [tuple(part.of_group(table) for part in parts) for table in inputs.tables]

    def write_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: LayerPages,
        batch: GroupBatch,
        extras: Extras,
    ) -> torch.Tensor:
        kernels = self._kernels
        assert kernels is not None and not isinstance(kernels, Missing), "reason_against was not asked"
        pages.write(key, value, batch.blocks, batch.offsets)
        left = -1 if pages.window is None else pages.window - 1
        how = How(extras.scaling, (left, 0), extras.softcap or 0.0, extras.sinks)
        parts: tuple[Part, ...] = batch.prepared
        output: torch.Tensor | None = None
        for part in parts:
            call = kernels.decode if part.decode else kernels.varlen
            if part.queries is None:
                return call(query, pages.keys, pages.values, part.rows, how)
            if output is None:
                output = torch.empty_like(query)
            output[part.queries] = call(query[part.queries], pages.keys, pages.values, part.rows, how)
        assert output is not None, "a step without rows"
        return output


@dataclass(frozen=True, slots=True)
class _Draft:
    """A part before it has a group's table."""

    decode: bool
    queries: Index | None
    rows: Index | None
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    kv_lengths: torch.Tensor
    max_q: int
    max_k: int
    width: int  # pages

    def of_group(self, table: torch.Tensor) -> Part:
        taken = (table if self.rows is None else table[self.rows])[:, : self.width]
        rows = Rows(cu_q=self.cu_q, cu_k=self.cu_k, kv_lengths=self.kv_lengths, table=taken, max_q=self.max_q, max_k=self.max_k)
        return Part(self.decode, self.queries, rows)


def _sums(lengths: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]: 0, and the sums of the first 1 … n lengths."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _whole(inputs: StepInputs, page_size: int, *, decode: bool) -> _Draft:
    """All rows in one call. Of a fixed step only shapes are known: then the longest row may be as long as they allow."""
    width = inputs.tables.shape[2]
    kv_lengths = inputs.starts + (inputs.cu_q[1:] - inputs.cu_q[:-1])
    max_q, max_k = inputs.ids.shape[0], width * page_size
    if decode:
        max_q = 1
    elif not inputs.fixed:
        max_q = max(inputs.row_lengths)
        max_k = max(start + length for start, length in zip(inputs.row_starts, inputs.row_lengths, strict=True))
    return _Draft(decode, None, None, inputs.cu_q, _sums(kv_lengths), kv_lengths, max_q, max_k, width)


def _divided(inputs: StepInputs, page_size: int, decode_width: int) -> list[_Draft]:
    short: list[int] = []
    long: list[int] = []
    chunks: list[int] = []
    for row, (start, length) in enumerate(zip(inputs.row_starts, inputs.row_lengths, strict=True)):
        kind = chunks if length > 1 else short if start < decode_width * page_size else long
        kind.append(row)
    return [
        _part(inputs, rows, page_size, decode=decode) for rows, decode in ((short, True), (long, True), (chunks, False)) if rows
    ]


def _part(inputs: StepInputs, rows: list[int], page_size: int, *, decode: bool) -> _Draft:
    starts = [inputs.row_starts[row] for row in rows]
    lengths = [inputs.row_lengths[row] for row in rows]
    max_k = max(start + length for start, length in zip(starts, lengths, strict=True))
    width = -(-max_k // page_size)
    if len(rows) == inputs.num_rows:
        whole = _whole(inputs, page_size, decode=decode)
        return _Draft(decode, None, None, whole.cu_q, whole.cu_k, whole.kv_lengths, max(lengths), max_k, width)
    first, last = rows[0], rows[-1]
    sizes = inputs.cu_q[1:] - inputs.cu_q[:-1]
    if last - first + 1 == len(rows):
        before = sum(inputs.row_lengths[:first])
        index: Index = slice(first, last + 1)
        queries: Index = slice(before, before + sum(lengths))
        cu_q = inputs.cu_q[first : last + 2] - before
    else:
        device = inputs.cu_q.device
        index = torch.tensor(rows, device=device)
        begins, at = [], 0
        for length in inputs.row_lengths:
            begins.append(at)
            at += length
        queries = torch.tensor([begins[row] + i for row, n in zip(rows, lengths, strict=True) for i in range(n)], device=device)
        cu_q = _sums(sizes[index])
    kv_lengths = inputs.starts[index] + sizes[index]
    return _Draft(decode, queries, index, cu_q, _sums(kv_lengths), kv_lengths, max(lengths), max_k, width)
