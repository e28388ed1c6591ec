"""The processes that run one model together, tensor parallel. Owns their groups, and how they come to the same decision.

Knows torch.distributed and a transformers model that was loaded with `DistributedConfig(tp_size=…)`; knows no plan and no request.
Rank 0 of the group is the leader. Three groups of the same ranks, each with its own kind of traffic:

    device   the model's own      all-reduces inside a forward pass; NCCL on GPUs, gloo on CPUs     a silent rank fails it
    orders   leader → followers   one ordered stream (`orders.py`), gloo; a follower waits in it for as long as nothing is to do
    talk     everybody            agreeing while an engine is built, meeting after a pause; gloo    a silent rank fails it
"""

from __future__ import annotations

import datetime
import math
import socket
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from ..errors import ConfigError, UnsupportedModelError

T = TypeVar("T")
_FOREVER = datetime.timedelta(days=3650)
_KEPT = "_cb_ray_ranks"  # attribute of a model that keeps its groups: making them takes every rank
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "c_attn")


class Ranks:
    """This process's place among the ranks of a model."""

    def __init__(self, mesh: DeviceMesh, timeout_s: float) -> None:
        """Every rank makes one at the same time. `timeout_s`: how long a rank may be silent when others wait for it; inf: for ever.

        A follower that has nothing to do is not silent: it waits for orders without a limit.
        """
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.device_group: Any = mesh.get_group()
        self.members = dist.get_process_group_ranks(self.device_group)
        self.timeout_s = timeout_s
        limit = _FOREVER if math.isinf(timeout_s) else datetime.timedelta(seconds=timeout_s)
        apart = len(self.members) < dist.get_world_size()
        groups: list[Any] = [
            dist.new_group(self.members, backend="gloo", timeout=patience, use_local_synchronization=apart)
            for patience in (limit if self.is_leader else _FOREVER, limit)
        ]
        self.orders_group, self.talk_group = groups
        dist.distributed_c10d._set_pg_timeout(limit, self.device_group)
        self.barrier()

    @classmethod
    def of(cls, model: PreTrainedModel, timeout_s: float) -> Ranks | None:
        """The ranks among which `model` is divided; None when it is whole. The groups are made once and kept with the model.

        Raises ConfigError for a model that is divided in other ways, too.
        """
        mesh = _tensor_parallel(getattr(model, "_device_mesh", None))
        if mesh is None:
            return None
        kept: Ranks | None = model.__dict__.get(_KEPT)
        if kept is None or kept.timeout_s != timeout_s:
            kept = model.__dict__[_KEPT] = cls(mesh, timeout_s)
        return kept

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def leader(self) -> int:
        """The leader's rank in the world."""
        return self.members[0]

    def barrier(self) -> None:
        """Go on when every rank is here. Raises RuntimeError when one does not come in time."""
        self.gather(None)

    def gather(self, value: T) -> list[T]:
        """What every rank says, in the order of ranks; the same list everywhere."""
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, value, group=self.talk_group)
        return cast("list[T]", said)

    def decide(self, make: Callable[[], T]) -> T:
        """What the leader makes, on every rank; what it raises is raised everywhere. Only the leader calls `make`."""
        said: list[Any] = [None, None]
        if self.is_leader:
            try:
                said[0] = make()
            except Exception as error:
                said[1] = error
        dist.broadcast_object_list(said, src=self.leader, group=self.talk_group, device=torch.device("cpu"))
        if said[1] is not None:
            raise said[1]
        return cast("T", said[0])

    def carry(self, ids: torch.Tensor) -> None:
        """In a pass: the leader's token ids, those it sampled last filled in, to the other ranks, from device to device."""
        dist.broadcast(ids, src=self.leader, group=self.device_group)

    def on_this_host(self) -> int:
        """How many ranks share this machine's memory."""
        return self.gather(_host()).count(_host())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share of a divided tensor, the same memory; a whole tensor itself."""
    return cast("torch.Tensor", tensor.to_local()) if isinstance(tensor, DTensor) else tensor


def share_of(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this rank has of `like`. Nothing is sent."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or value.shape != like.shape:
        return value
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(value.to(local(like).device), mesh, placements, src_data_rank=None).to_local()


def _host() -> str:
    """A name that two containers with the same host name do not share."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()


def _tensor_parallel(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The tensor parallel part of a model's mesh, if it is one with several ranks; a mesh without names is that part itself."""
    if mesh is None:
        return None
    names = mesh.mesh_dim_names
    if names is None:
        return mesh if mesh.size() > 1 else None
    others = {name: mesh[name].size() for name in names if name != "tp" and mesh[name].size() > 1}
    if others:
        raise ConfigError(
            f"an engine runs models divided by tp alone; this one is also divided by {others}", "distributed_config"
        )
    return mesh["tp"] if "tp" in names and mesh["tp"].size() > 1 else None


def check_heads(config: Any, plan: dict[str, str] | None, size: int) -> None:
    """Raises UnsupportedModelError, with the numbers, when attention heads cannot be shared out evenly among `size` ranks.

    transformers would cut the matrices anywhere, in the middle of a head. `plan` is the model's tensor parallel plan.
    """
    divided = any(name.rsplit(".", 1)[-1] in _KEY_PROJECTIONS and style == "colwise" for name, style in (plan or {}).items())
    text = config.get_text_config(decoder=True)
    heads = _all(getattr(text, "num_attention_heads", None))
    kv_heads = _all(getattr(text, "num_key_value_heads", None)) or heads
    if not divided or size == 1 or not heads:
        return
    uneven = [f"{count} {what}" for what, counts in (("KV heads", kv_heads), ("attention heads", heads)) for count in counts]
    uneven = [text for text in dict.fromkeys(uneven) if int(text.split()[0]) % size]
    if uneven:
        common = math.gcd(*heads, *kv_heads)
        possible = [n for n in range(1, common + 1) if common % n == 0]
        raise UnsupportedModelError(
            str(getattr(text, "model_type", type(config).__name__)),
            f"{' and '.join(uneven)} cannot be divided among {size} ranks; "
            f"tensor parallel sizes that divide them: {', '.join(map(str, possible))}",
        )


def _all(count: int | list[int] | None) -> list[int]:
    """A number of heads that may differ from layer to layer."""
    return [] if count is None else [count] if isinstance(count, int) else list(count)
