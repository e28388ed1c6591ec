"""From a plan to tensors. Owns the packed int32 buffer and its layout; knows nothing of models or attention math.

All integers of a step travel in one buffer, so a step costs one copy to the device and followers need nothing else:

    field        items     meaning
    ids          Q         token ids; carried ones are filled in on the device
    positions    Q         absolute position of each token
    cu_q         B + 1     where each row's tokens begin in the packed sequence
    starts       B         tokens of the row that were in the cache before this step
    last         S         packed index of the last token of each row that samples
    slots        G × Q     where each token's keys and values go: block * page_size + offset
    tables       G × B × T block of each page, 0 (trash) beyond a row's end
    carry_to     C         packed index of each carried token
    carry_from   C         the sampling row of the step before that holds it

Q tokens, B rows, S sampling rows, C carried tokens, G layer groups, T pages of the longest row. What is carried comes last: steps that
are alike but for it have everything else at the same place.

A step may be padded to larger sizes. Padding rows and tokens are as harmless as they can be: their tables and slots are the trash
block's, padding entries of `last` name token 0, and nobody looks at what comes of them. Tokens without rows of their own (a step of
chunks) belong to one padding row, so that every query has keys to attend to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..core.plan import BatchPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tensors of one step on the device (int32), and the few numbers that the host needs to drive it."""

    ids: torch.Tensor  # [Q]
    positions: torch.Tensor  # [Q]
    cu_q: torch.Tensor  # [B + 1]
    starts: torch.Tensor  # [B]
    last: torch.Tensor  # [S]
    carry_to: torch.Tensor  # [C]
    carry_from: torch.Tensor  # [C]
    slots: torch.Tensor  # [G, Q]
    tables: torch.Tensor  # [G, B, T]
    row_starts: list[int]
    row_lengths: list[int]
    fixed: bool = False  # the tensors' shapes are the step's, their contents and the two lists change: see graphs.py

    @property
    def num_rows(self) -> int:
        return len(self.row_lengths)


@dataclass(frozen=True, slots=True)
class Padded:
    """Sizes that a step is padded to."""

    tokens: int
    rows: int
    samples: int
    width: int  # pages

    @staticmethod
    def of(sizes: tuple[int, ...]) -> Padded:
        q, b, s, _, _, t = sizes
        return Padded(q, b, s, t)


def measure(plan: BatchPlan) -> Padded:
    """The sizes of a step as it is."""
    rows = plan.rows
    width = max((len(table) for row in rows for table in row.tables), default=0)
    return Padded(sum(row.length for row in rows), len(rows), sum(row.samples for row in rows), width)


def pack(plan: BatchPlan, page_size: int, num_groups: int, padded: Padded | None = None) -> tuple[np.ndarray, tuple[int, ...]]:
    """The step's buffer (int32, one dimension) and the sizes (Q, B, S, C, G, T) that cut it."""
    rows = plan.rows
    lengths = np.fromiter((len(row.token_ids) for row in rows), np.int32, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int32, len(rows))
    cu_q = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=cu_q[1:])
    total = int(cu_q[-1])
    ids = np.frombuffer(b"".join([row.token_ids for row in rows]), np.int32)  # type: ignore[list-item]
    row_of = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
    positions = np.arange(total, dtype=np.int32) - cu_q[row_of] + starts[row_of]
    samples = np.fromiter((row.samples for row in rows), bool, len(rows))
    carries = np.fromiter((row.carry_from for row in rows), np.int32, len(rows))
    carried = carries >= 0
    ends = cu_q[1:] - 1
    last, carry_to, carry_from = ends[samples], ends[carried], carries[carried]
    tables, slots = [], []
    for g in range(num_groups):
        table = _table([row.tables[g] for row in rows])
        tables.append(table)
        slots.append(table[row_of, positions // page_size] * page_size + positions % page_size)
    width = tables[0].shape[1] if tables else 0
    if padded is not None:
        ids, positions, slots = (_longer(part, padded.tokens) for part in (ids, positions, np.stack(slots)))
        cu_q, starts, last = _pad_rows(cu_q, padded), _longer(starts, padded.rows), _longer(last, padded.samples)
        tables = [np.pad(t, ((0, padded.rows - len(rows)), (0, padded.width - width))) for t in tables]
        total, width = padded.tokens, padded.width
    parts = [ids, positions, cu_q, starts, last, *slots, *(table.ravel() for table in tables), carry_to, carry_from]
    sizes = (total, len(cu_q) - 1, len(last), len(carry_to), num_groups, width)
    return np.concatenate(parts, dtype=np.int32, casting="unsafe"), sizes


def blank(padded: Padded, num_groups: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """A step of nothing but padding."""
    q, b, s, t = padded.tokens, padded.rows, padded.samples, padded.width
    cu_q = _pad_rows(np.zeros(1, np.int32), padded)
    host = np.zeros(2 * q + (b + 1) + b + s + num_groups * (q + b * t), np.int32)
    host[2 * q : 2 * q + b + 1] = cu_q
    return host, (q, b, s, 0, num_groups, t)


def _longer(part: np.ndarray, size: int) -> np.ndarray:
    """Zeros behind what there is, along the last dimension."""
    before = [(0, 0)] * (part.ndim - 1)
    return np.pad(part, [*before, (0, size - part.shape[-1])])


def _pad_rows(cu_q: np.ndarray, padded: Padded) -> np.ndarray:
    """Padding rows take the padding tokens: one each where there is one for each, else the first takes all."""
    rows, tokens = len(cu_q) - 1, int(cu_q[-1])
    more, left = padded.rows - rows, padded.tokens - tokens
    assert more >= 0 and left >= 0 and (more or not left), "a step does not fit the sizes that it is padded to"
    ends = tokens + np.arange(1, more + 1) if left == more else np.full(more, padded.tokens)
    return np.concatenate([cu_q, ends.astype(np.int32)])


def _table(tables: list) -> np.ndarray:
    """Block tables of unequal length as one matrix [B, T], padded with the trash block."""
    widths = np.fromiter(map(len, tables), np.int32, len(tables))
    flat = np.frombuffer(b"".join(tables), np.int32)
    matrix = np.zeros((len(tables), int(widths.max())), np.int32)
    matrix[np.arange(matrix.shape[1]) < widths[:, None]] = flat
    return matrix


def unpack(buffer: torch.Tensor, host: np.ndarray, sizes: tuple[int, ...]) -> StepInputs:
    """Cut a packed buffer, wherever it lies, into the tensors of a step. No copy. `host` is the same buffer on the host."""
    q, b, s, c, g, t = sizes
    ids, positions, cu_q, starts, last, slots, tables, carry_to, carry_from = buffer.split(
        [q, q, b + 1, b, s, g * q, g * b * t, c, c]
    )
    bounds = host[2 * q : 2 * q + b + 1]
    return StepInputs(
        ids=ids,
        positions=positions,
        cu_q=cu_q,
        starts=starts,
        last=last,
        carry_to=carry_to,
        carry_from=carry_from,
        slots=slots.view(g, q),
        tables=tables.view(g, b, t),
        row_starts=host[2 * q + b + 1 : 2 * q + 2 * b + 1].tolist(),
        row_lengths=(bounds[1:] - bounds[:-1]).tolist(),
    )
