"""What the machine has: memory that is free, on the device and in this container's share of the host, and fast bfloat16.

Owns `measure`; hands out `multiplies_bfloat16` and `widens_weights`. Knows psutil, the kernel's cgroup files and torch's memory
counters; decides nothing. What other processes use is gone already when the system says what is available, so their share is never
counted as ours.

    host RAM     min( what the system calls available,  limit of each enclosing cgroup − what it holds )
    GPU          what the driver calls free  +  what torch has reserved but does not use
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from ..runtime.native.parts import multiplies_bfloat16, widens_weights
from ..runtime.ranks import Ranks
from ..sizing import Machine

__all__ = ["free_host_bytes", "measure", "multiplies_bfloat16", "widens_weights"]

Read = Callable[[str], str | None]  # a file's text, or None when it is not there

_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def measure(device: torch.device | str) -> Machine:
    """Free memory of `device` and of the host, in bytes, now."""
    host = free_host_bytes()
    device = torch.device(device)
    if device.type == "cuda":
        return Machine(free_bytes=_free_cuda_bytes(device), free_host_bytes=host)
    if device.type == "xpu":
        free, _ = torch.xpu.mem_get_info(device)
        return Machine(free_bytes=int(free), free_host_bytes=host)
    if device.type == "mps":
        limit, used = torch.mps.recommended_max_memory(), torch.mps.driver_allocated_memory()
        return Machine(free_bytes=max(0, min(int(limit - used), host)), free_host_bytes=host)
    return Machine(free_bytes=host, free_host_bytes=host)


def least(machine: Machine, ranks: Ranks, *, shared: bool) -> Machine:
    """What every rank of a divided model has: the least that one of them measured, after those on one host have shared its RAM.

    `shared`: the model's device is that RAM, too.
    """
    here = ranks.on_this_host()
    device_bytes = machine.free_bytes // here if shared else machine.free_bytes
    found = ranks.gather((device_bytes, machine.free_host_bytes // here))
    return Machine(free_bytes=min(device for device, _ in found), free_host_bytes=min(host for _, host in found))


def free_host_bytes(available: int | None = None, read: Read | None = None) -> int:
    """RAM that this process may still take, in bytes. `available` and `read` stand for the system's word and its files."""
    if available is None:
        available = _available()
    limits = _cgroup_rooms(read or _read)
    return max(0, min([available, *limits]))


def _available() -> int:
    """What the system calls available; without psutil, pages that nobody uses at all."""
    try:
        import psutil
    except ImportError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(psutil.virtual_memory().available)


def _free_cuda_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None


def _cgroup_rooms(read: Read) -> list[int]:
    """Room left in each memory cgroup that this process is in, bytes; empty where there is no limit (or no Linux)."""
    rooms: list[int] = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            rooms += _rooms_upwards(read, "/sys/fs/cgroup", path, _CGROUP_V2)
        elif "memory" in controllers.split(","):
            rooms += _rooms_upwards(read, "/sys/fs/cgroup/memory", path, _CGROUP_V1)
    return rooms


def _rooms_upwards(read: Read, root: str, path: str, names: tuple[str, str, str]) -> list[int]:
    limit_file, usage_file, reclaimable = names
    rooms: list[int] = []
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        folder = "/".join([root, *parts[:depth]])
        limit, used = read(f"{folder}/{limit_file}"), read(f"{folder}/{usage_file}")
        if limit is None or used is None or not limit.strip().isdigit():  # "max": no limit
            continue
        cached = _stat(read(f"{folder}/memory.stat"), reclaimable)
        rooms.append(int(limit) - int(used) + cached)
    return rooms


def _stat(text: str | None, name: str) -> int:
    """One number out of `memory.stat`: file pages that the kernel gives back before it refuses anybody."""
    for line in (text or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
