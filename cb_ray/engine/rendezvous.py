"""How the processes of one model meet when nobody started them together: a store on a free port, then torch's process group.

Owns the store, the group's settings, and loading a rank's share of a model. Knows torch.distributed; who the processes are and who
starts them is not its business. Under `torchrun` none of this is needed: transformers makes the group from the environment.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import datetime
import os
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, DistributedConfig

from ..errors import UnsupportedModelError
from ..runtime.ranks import check_heads

_LOADING = datetime.timedelta(hours=2)  # ranks may load at very different speeds; steps have a timeout of their own


def open_store(host: str, size: int) -> tuple[Any, str, int]:
    """A store that lives as long as it is kept, its host and the free port that it took. `host` is this machine's address."""
    store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=_LOADING)
    return store, host, store.port


def join(host: str, port: int, rank: int, size: int, *, address: str, device: torch.device, graph_mixing: bool) -> None:
    """Join the process group of `size` ranks that meets at the store `host`:`port`. Blocks until all are there.

    `address`: by which the other machines reach this one. `graph_mixing`: NCCL is also used beside the engine, and pays for being
    asked from several places.
    """
    interface = _interface(address)
    if interface is not None:  # the libraries guess by the machine's name, which in containers is often another network's
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if not graph_mixing:
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    store = dist.TCPStore(host, port, size, is_master=False, timeout=_LOADING)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_LOADING)


def load_share(path: str, dtype: Any, size: int) -> Any:
    """This rank's share of the model at `path`, on its device, once the ranks have met.

    Raises UnsupportedModelError, before anything is read, when the model's heads cannot be shared out, or it has no plan for it.
    """
    config: Any = AutoConfig.from_pretrained(path)
    plan = getattr(config.get_text_config(decoder=True), "base_model_tp_plan", None)
    if not plan:
        raise UnsupportedModelError(str(config.model_type), f"transformers has no plan to divide it among {size} ranks")
    check_heads(config, plan, size)
    maker: Any = AutoModelForCausalLM
    return maker.from_pretrained(path, dtype=dtype, distributed_config=DistributedConfig(tp_size=size)).eval()


def _interface(address: str) -> str | None:
    """The network interface that has `address`."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None
