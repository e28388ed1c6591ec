"""What stands in place of `torch.cuda.CUDAGraph` on a CPU: it records torch's operations and does them again on the same tensors.

As with a real graph, Python runs once: whatever the host knew then is what every replay knows, addresses included. An operation that
asks a tensor for a number on the host is refused, as a capture refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ASKS_THE_DEVICE = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _ASKS_THE_DEVICE:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        result = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]))
        return result


class _Replay:
    def __init__(self, steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]]) -> None:
        self._steps = steps
        self.count = 0

    def replay(self) -> None:
        self.count += 1
        for func, args, kwargs, outputs in self._steps:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for old, new in zip(outputs, again, strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor written in place
                    old.copy_(new)


class DispatchRecorder:
    """For `Graphs`. `captures` are in order."""

    def __init__(self) -> None:
        self.captures: list[_Replay] = []

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[_Replay, torch.Tensor]:
        run()
        with _Recording() as recording:
            output = run()
        self.captures.append(_Replay(recording.steps))
        output.fill_(torch.nan)  # a capture computes nothing
        return self.captures[-1], output
