"""`python -m cb_ray.runtime.native`: compile the kernels into the package, so that an image's processes need no compiler.

Owns what is printed; how it is compiled is `compiler.py`'s. Run it where the package may be written to, as an image's build does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from . import compiler


def main() -> int:
    """0, or 1 with the reason when they could not be compiled."""
    try:
        path = compiler.ship(compiler.Torch(version=str(torch.__version__), root=Path(torch.__file__).parent))
    except (compiler.BuildError, OSError) as error:
        sys.stderr.write(f"the kernels were not compiled: {error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
