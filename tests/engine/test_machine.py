"""Free memory: what the system says, and what the container allows, whichever is less."""

from __future__ import annotations

import pytest

from cb_ray.engine.machine import free_host_bytes, measure

GB = 10**9


V2 = {
    "/proc/self/cgroup": "0::/pod/box\n",
    "/sys/fs/cgroup/pod/box/memory.max": "4000000000\n",
    "/sys/fs/cgroup/pod/box/memory.current": "3000000000\n",
    "/sys/fs/cgroup/pod/box/memory.stat": "anon 2500000000\ninactive_file 500000000\n",
    "/sys/fs/cgroup/pod/memory.max": "max\n",
    "/sys/fs/cgroup/pod/memory.current": "3500000000\n",
}
V1 = {
    "/proc/self/cgroup": "5:cpu:/x\n4:memory:/box\n",
    "/sys/fs/cgroup/memory/box/memory.limit_in_bytes": "2000000000\n",
    "/sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1800000000\n",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": "50000000000\n",
}


@pytest.mark.parametrize(
    ("system", "contents", "free"),
    [
        (10 * GB, {}, 10 * GB),
        (10 * GB, V2, int(1.5 * GB)),
        (GB, V2, GB),
        (10 * GB, V1, int(0.2 * GB)),
        (10 * GB, {**V2, "/sys/fs/cgroup/pod/memory.max": "3600000000"}, int(0.1 * GB)),
        (10 * GB, {**V2, "/sys/fs/cgroup/pod/box/memory.current": "5000000000"}, 0),
    ],
    ids=["no limits", "v2", "system is tighter", "v1", "an outer group is tighter", "over the limit"],
)
def test_the_tightest_limit_counts(system: int, contents: dict[str, str], free: int) -> None:
    """Container limits were not looked at, nor were other processes; file pages that the kernel gives back do not count."""
    assert free_host_bytes(system, contents.get) == free


def test_this_machine_can_be_measured() -> None:
    """Positive, and the device's memory is the host's on a CPU."""
    machine = measure("cpu")
    assert 0 < machine.free_bytes == machine.free_host_bytes
