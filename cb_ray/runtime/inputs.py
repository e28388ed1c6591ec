"""From a plan to tensors. Owns the packed int32 buffer and its layout; knows nothing of models or attention math.

All integers of a step travel in one buffer, so a step costs one copy to the device and followers need nothing else:

    field        items     meaning
    ids          Q         token ids; carried ones are filled in on the device
    positions    Q         absolute position of each token
    cu_q         B + 1     where each row's tokens begin in the packed sequence
    starts       B         tokens of the row that were in the cache before this step
    last         S         packed index of the last token of each row that samples
    carry_to     C         packed index of each carried token
    carry_from   C         the sampling row of the step before that holds it
    slots        G × Q     where each token's keys and values go: block * page_size + offset
    tables       G × B × T block of each page, 0 (trash) beyond a row's end

Q tokens, B rows, S sampling rows, C carried tokens, G layer groups, T pages of the longest row.
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


def pack(plan: BatchPlan, page_size: int, num_groups: int) -> tuple[np.ndarray, tuple[int, ...]]:
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
    parts = [ids, positions, cu_q, starts, last, carry_to, carry_from, *slots, *(table.ravel() for table in tables)]
    sizes = (total, len(rows), len(last), len(carry_to), num_groups, tables[0].shape[1] if tables else 0)
    return np.concatenate(parts, dtype=np.int32, casting="unsafe"), sizes


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
    ids, positions, cu_q, starts, last, carry_to, carry_from, slots, tables = buffer.split(
        [q, q, b + 1, b, s, c, c, g * q, g * b * t]
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
