"""The `cpu` backend: attention by the native kernels, straight from the pages. Owns nothing; asks `native` for its ops.

One call per layer writes keys and values and attends; grouped heads share what is read, and nothing is gathered or repeated.
"""

from __future__ import annotations

import torch

from .attention import Extras, GroupBatch
from .inputs import StepInputs
from .kv_cache import LayerPages
from .native import NativeOps, Unavailable, load
from .survey import AttentionSite

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class NativeBackend:
    """Any head dims, windows, softcaps and sinks, on a CPU, where a compiler is (or was, when the wheel was built)."""

    name = "cpu"

    def __init__(self) -> None:
        self._ops: NativeOps | None = None

    def reason_against(self, site: AttentionSite, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"the model is on {device.type}"
        if site.dtype not in _DTYPES:
            return f"layer {site.index} computes in {site.dtype}"
        if self._ops is None:
            ops = load()
            if isinstance(ops, Unavailable):
                return ops.reason
            self._ops = ops
        return None

    def prepare(self, inputs: StepInputs, page_size: int, decode_width: int) -> None:
        """Nothing: the kernels read the step's tensors as they are."""

    def write_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pages: LayerPages,
        batch: GroupBatch,
        extras: Extras,
    ) -> torch.Tensor:
        assert self._ops is not None, "reason_against was not asked"
        return self._ops.write_and_attend(
            query,
            key,
            value,
            pages.keys,
            pages.values,
            batch.slots,
            batch.table,
            batch.cu_q,
            batch.starts,
            extras.scaling,
            pages.window or 0,
            extras.softcap or 0.0,
            extras.sinks,
        )
