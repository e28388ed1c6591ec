"""Attention over pages in plain torch. Owns the `eager` and `sdpa` backends; both read pages through block tables, row by row.

`eager` computes anything a layer may ask for and is the reference; `sdpa` is torch's fused kernel where it can say the same.
Decode rows are taken together in buckets of similar length, so that a step of many short rows costs few calls and no row pays
for the longest one; no mask spans the keys of more than one row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from .attention import Extras, GroupBatch
from .inputs import StepInputs
from .kv_cache import LayerPages
from .survey import AttentionSite


def visible(start: int, length: int, first: int, end: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Bool [length, end - first]: whether the query at position start + i sees key position first + j. None: it sees them all."""
    if length == 1 and (window is None or first >= start - window + 1):
        return None
    queries = torch.arange(start, start + length, device=device)[:, None]
    keys = torch.arange(first, end, device=device)[None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def gather(pages: LayerPages, table: torch.Tensor, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keys and values [kv_heads, n, dim] of positions from the page of `first` to `end`, and the position of the first key."""
    page_size = pages.keys.shape[1]
    page = first // page_size
    blocks = table[page : -(-end // page_size)].long()
    start = page * page_size
    keys = pages.keys[blocks].flatten(0, 1)[: end - start].transpose(0, 1)
    values = pages.values[blocks].flatten(0, 1)[: end - start].transpose(0, 1)
    return keys, values, start


class _RowByRow:
    """Writing, and walking the rows of a step; the attention itself is the subclass's."""

    def prepare(self, inputs: StepInputs, page_size: int, decode_width: int) -> None:
        """Nothing: rows are read as the host knows them."""

    def write_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: LayerPages,
        batch: GroupBatch,
        extras: Extras,
    ) -> torch.Tensor:
        pages.write(key, value, batch.blocks, batch.offsets)
        return self.attend(query, pages, batch, extras)

    def attend(self, query: torch.Tensor, pages: LayerPages, batch: GroupBatch, extras: Extras) -> torch.Tensor:
        raise NotImplementedError

    def _rows(self, batch: GroupBatch, window: int | None) -> Iterator[tuple[int, slice, int, int, int]]:
        """(row, its packed queries, start position, end position, first visible position)."""
        at = 0
        for row, (start, length) in enumerate(zip(batch.row_starts, batch.row_lengths, strict=True)):
            first = 0 if window is None else max(0, start - window + 1)
            yield row, slice(at, at + length), start, start + length, first
            at += length


class EagerBackend(_RowByRow):
    """Matrix products and a softmax in float32: any head dims, windows, softcaps and sinks."""

    name = "eager"

    def reason_against(self, site: AttentionSite, device: torch.device) -> str | None:
        return None

    def attend(self, query: torch.Tensor, pages: LayerPages, batch: GroupBatch, extras: Extras) -> torch.Tensor:
        heads, kv_heads = query.shape[1], pages.keys.shape[2]
        output = query.new_empty(query.shape[0], heads, pages.values.shape[-1])
        for row, queries, start, end, first in self._rows(batch, pages.window):
            keys, values, begin = gather(pages, batch.table[row], first, end)
            length = end - start
            grouped = query[queries].transpose(0, 1).reshape(kv_heads, -1, query.shape[-1])  # [kv_heads, ratio * length, k_dim]
            scores = torch.matmul(grouped, keys.transpose(1, 2)).view(heads, length, -1) * extras.scaling
            if extras.softcap:
                scores = torch.tanh(scores / extras.softcap) * extras.softcap
            seen = visible(start, length, begin, end, pages.window, query.device)
            if seen is not None:
                scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
            if extras.sinks is not None:
                sinks = extras.sinks.reshape(-1, 1, 1).expand(-1, length, 1).to(scores.dtype)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)[..., : keys.shape[1]]
            mixed = torch.matmul(weights.reshape(kv_heads, -1, keys.shape[1]), values)
            output[queries] = mixed.view(heads, length, -1).transpose(0, 1)
        return output


class SdpaBackend(_RowByRow):
    """`torch.nn.functional.scaled_dot_product_attention`, without repeating keys for grouped heads."""

    name = "sdpa"

    def reason_against(self, site: AttentionSite, device: torch.device) -> str | None:
        if site.softcap:
            return f"layer {site.index} caps its attention logits at {site.softcap:g}, which sdpa cannot"
        return f"layer {site.index} has attention sinks, which sdpa cannot have" if site.has_sinks else None

    def attend(self, query: torch.Tensor, pages: LayerPages, batch: GroupBatch, extras: Extras) -> torch.Tensor:
        output = query.new_empty(query.shape[0], query.shape[1], pages.values.shape[-1])
        singles: dict[int, list[tuple[int, int, int, int]]] = {}
        for row, queries, start, end, first in self._rows(batch, pages.window):
            if end - start == 1:
                page_size = pages.keys.shape[1]
                width = -(-end // page_size) - first // page_size
                singles.setdefault((width - 1).bit_length(), []).append((row, queries.start, end, first))
            else:
                output[queries] = self._stretch(query[queries], pages, batch.table[row], start, end, first, extras)
        for rows in singles.values():
            index = torch.tensor([at for _, at, _, _ in rows], device=query.device)
            output[index] = self._singles(query[index], pages, batch.table, rows, extras)
        return output

    def _stretch(
        self,
        query: torch.Tensor,
        pages: LayerPages,
        table: torch.Tensor,
        start: int,
        end: int,
        first: int,
        extras: Extras,
    ) -> torch.Tensor:
        """Several queries of one row: [n, heads, k_dim] → [n, heads, v_dim]."""
        keys, values, begin = gather(pages, table, first, end)
        heads, kv_heads, length = query.shape[1], keys.shape[0], end - start
        ratio = heads // kv_heads
        grouped = query.transpose(0, 1).reshape(1, kv_heads, ratio * length, -1)
        seen = visible(start, length, begin, end, pages.window, query.device)
        mask = None if seen is None else seen.repeat(ratio, 1)
        mixed = functional.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask, scale=extras.scaling)
        return mixed.view(heads, length, -1).transpose(0, 1)

    def _singles(
        self,
        query: torch.Tensor,
        pages: LayerPages,
        table: torch.Tensor,
        rows: list[tuple[int, int, int, int]],
        extras: Extras,
    ) -> torch.Tensor:
        """Decode rows of similar length in one call: [b, heads, k_dim] → [b, heads, v_dim]; heads of a group are its queries."""
        page_size, kv_heads = pages.keys.shape[1], pages.keys.shape[2]
        firsts = [first // page_size for _, _, _, first in rows]
        width = max(-(-end // page_size) - page for (_, _, end, _), page in zip(rows, firsts, strict=True))
        device = query.device
        index = torch.tensor(firsts, device=device)[:, None] + torch.arange(width, device=device)
        blocks = table[torch.tensor([row for row, _, _, _ in rows], device=device)[:, None], index.clamp(max=table.shape[1] - 1)]
        positions = (torch.tensor(firsts, device=device) * page_size)[:, None] + torch.arange(width * page_size, device=device)
        ends = torch.tensor([end for _, _, end, _ in rows], device=device)[:, None]
        seen = positions < ends
        if pages.window is not None:
            seen &= positions >= ends - pages.window
        keys = pages.keys[blocks.long()].flatten(1, 2).transpose(1, 2)  # [b, kv_heads, n, k_dim]
        values = pages.values[blocks.long()].flatten(1, 2).transpose(1, 2)
        # Past a row's end lies whatever was there; a NaN would poison the row in spite of the mask (NaN - inf, 0 * NaN).
        hidden = ~seen[:, None, :, None]
        keys.masked_fill_(hidden, 0)
        values.masked_fill_(hidden, 0)
        grouped = query.view(len(rows), kv_heads, -1, query.shape[-1])
        mixed = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=seen[:, None, None], scale=extras.scaling
        )
        return mixed.reshape(len(rows), query.shape[1], -1)
