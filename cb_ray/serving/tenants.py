"""Who calls: API keys, the tenants they belong to, and what each tenant may use.

Owns `Tenant`, `Keyring` (keys from a list or a file, compared as digests in constant time) and `TenantGate` (rate and concurrency).
Knows no HTTP and no engines. Keys themselves are never kept: only their digests are.

A file of keys holds one key a line, or tenants:

    tenants:
      - name: search
        api_keys: [sk-…, sha256:9f86d0…]       a key, or its SHA-256
        own_cache: true                        cached prefixes are not shared with other tenants (the default)
        requests_per_minute: 600
        max_concurrent: 32
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, TenantLimitError, nearest

_RELOAD_S = 1.0  # how often, at most, a file is looked at again, when requests come
_BURST_S = 10.0  # so many seconds' worth of requests may come at once
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FIELDS = {"name", "api_keys", "own_cache", "requests_per_minute", "max_concurrent"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One customer of the server. The nameless one is everybody, or all who have a key of a plain list."""

    name: str = ""
    own_cache: bool = False
    requests_per_minute: float | None = None
    max_concurrent: int | None = None

    def salt(self, wanted: str) -> str:
        """The salt under which this tenant's prefixes are cached when a request wants `wanted`. No other tenant can make it."""
        if not self.name:
            return wanted
        if self.own_cache:
            return f"tenant:{self.name}:{wanted}"
        return wanted and f"shared:{wanted}"


EVERYBODY = Tenant()


class Keyring:
    """Which tenant a key belongs to. Without keys and without a file, everybody may call.

    The file is read again when it has changed, so that keys can be given and taken away without a restart; one that cannot be
    read then leaves the keys as they are. Raises ConfigError for a file that cannot be read at first.
    """

    def __init__(self, keys: Sequence[str] = (), file: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._listed = [(_written_digest(key), EVERYBODY) for key in keys]
        self._file, self._clock = file, clock
        self._looked_at = clock()
        self._stamp = _stamp(file) if file else None
        self._from_file = read_keys(file) if file else []

    @property
    def is_open(self) -> bool:
        return not self._listed and self._file is None

    def find(self, presented: str) -> Tenant | None:
        """The tenant of a key. Takes as long for a wrong key as for a right one."""
        self._look_again()
        digest, found = _digest(presented), None
        for known, tenant in (*self._listed, *self._from_file):
            if hmac.compare_digest(digest, known):
                found = tenant
        return found

    def _look_again(self) -> None:
        if self._file is None or self._clock() - self._looked_at < _RELOAD_S:
            return
        self._looked_at = self._clock()
        stamp = _stamp(self._file)
        if stamp is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._from_file = read_keys(self._file)
        except ConfigError:
            return


def read_keys(file: str) -> list[tuple[bytes, Tenant]]:
    """Digests and tenants of a file of keys. Raises ConfigError, which never quotes a key."""
    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"router.api_keys_file {file} cannot be read: {type(error).__name__}", "router.api_keys_file") from None
    if not re.search(r"^tenants:", text, re.MULTILINE):
        lines = (line.strip() for line in text.splitlines())
        return [(_written_digest(line), EVERYBODY) for line in lines if line and not line.startswith("#")]
    try:
        entries = yaml.safe_load(text)["tenants"]
    except (yaml.YAMLError, TypeError, KeyError):
        raise ConfigError(f"router.api_keys_file {file} is no valid YAML", "router.api_keys_file") from None
    found: list[tuple[bytes, Tenant]] = []
    names: set[str] = set()
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries]):
        tenant, keys = _tenant(entry, f"{file}: tenants[{number}]")
        _require(tenant.name not in names, f"{file}: tenants[{number}].name", "a name of its own")
        names.add(tenant.name)
        found += [(_written_digest(key), tenant) for key in keys]
    return found


def _tenant(entry: Any, where: str) -> tuple[Tenant, Iterable[str]]:
    _require(isinstance(entry, dict), where, "a mapping with a name and api_keys")
    for name in entry.keys() - _FIELDS:
        raise ConfigError(f"{where}: unknown setting {str(name)[:40]!r}; {nearest(str(name), _FIELDS)}", "router.api_keys_file")
    name, keys = entry.get("name"), entry.get("api_keys")
    _require(isinstance(name, str) and _NAME.fullmatch(name), f"{where}.name", "letters, digits, dots, dashes")
    listed = isinstance(keys, list) and keys and all(isinstance(key, str) and key for key in keys)
    _require(listed, f"{where}.api_keys", "a list of keys")
    rate, most, own = entry.get("requests_per_minute"), entry.get("max_concurrent"), entry.get("own_cache", True)
    _require(rate is None or (type(rate) in (int, float) and rate > 0), f"{where}.requests_per_minute", "a number above 0")
    _require(most is None or (type(most) is int and most > 0), f"{where}.max_concurrent", "a whole number above 0")
    _require(isinstance(own, bool), f"{where}.own_cache", "true or false")
    return Tenant(name=name, own_cache=own, requests_per_minute=rate, max_concurrent=most), keys


def _require(holds: Any, where: str, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"{where} must be {wanted}", "router.api_keys_file")


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _written_digest(key: str) -> bytes:
    """The digest of a key as an operator wrote it down: the key, or its digest already. Clients can only send keys."""
    given = key.removeprefix("sha256:")
    return bytes.fromhex(given) if given != key and re.fullmatch(r"[0-9a-fA-F]{64}", given) else _digest(key)


class TenantGate:
    """What each tenant uses of its limits in one Router, over all models. With several Routers each lets through its share.

    A tenant's requests come through while its bucket holds one, which fills at its rate, and while fewer than its bound run.
    """

    def __init__(self, num_routers: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_routers, self._clock = num_routers, clock
        self._running: dict[str, int] = {}
        self._buckets: dict[str, tuple[float, float]] = {}  # name → (requests in it, as of when)
        self._seconds: dict[str, float] = {}  # name → how long its requests take, about

    def enter(self, tenant: Tenant) -> float:
        """Let a request in; the time at which it came. Raises TenantLimitError, with the time to come back."""
        now, name = self._clock(), tenant.name
        running = self._running.get(name, 0)
        if tenant.max_concurrent is not None:
            most = max(1, tenant.max_concurrent // self._num_routers)
            if running >= most:
                raise TenantLimitError("concurrent requests", most, max(1.0, self._seconds.get(name, 1.0) / most))
        if tenant.requests_per_minute is not None:
            self._take(tenant, now)
        self._running[name] = running + 1
        return now

    def leave(self, tenant: Tenant, since: float) -> None:
        """A request that was let in is over."""
        name, took = tenant.name, self._clock() - since
        self._running[name] -= 1
        if not self._running[name]:
            del self._running[name]
        mean = self._seconds.get(name, took)
        self._seconds[name] = mean + (took - mean) * 0.2

    def running(self) -> dict[str, int]:
        """Requests inside, by tenant."""
        return dict(self._running)

    def _take(self, tenant: Tenant, now: float) -> None:
        rate = (tenant.requests_per_minute or 0.0) / 60 / self._num_routers
        capacity = max(1.0, rate * _BURST_S)
        held, since = self._buckets.get(tenant.name, (capacity, now))
        held = min(capacity, held + (now - since) * rate)
        if held < 1:
            self._buckets[tenant.name] = (held, now)
            per_minute = math.floor((tenant.requests_per_minute or 0.0) / self._num_routers)
            raise TenantLimitError("requests a minute", max(1, per_minute), (1 - held) / rate)
        self._buckets[tenant.name] = (held - 1, now)
