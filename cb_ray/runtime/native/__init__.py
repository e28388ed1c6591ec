"""Kernels in C++ for models on a CPU: paged attention, products with weights, norms, rotary, choosing tokens.

Owns the sources beside this file, compiling them once into the user's cache, and the torch ops `cb_ray::*` with their fake
implementations. May not know models, requests or which backend is in use.

`load()` never raises: it answers `NativeOps`, or `Unavailable` with the reason, after one log line.
"""

from .loader import NativeOps, Unavailable, load
from .memory import advise_huge_pages

__all__ = ["NativeOps", "Unavailable", "advise_huge_pages", "load"]
