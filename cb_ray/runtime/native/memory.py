"""Large pages under a tensor that is read in scattered pieces.

Owns one system call. A decode step jumps through the KV cache from page to page; with memory mapped in pieces of 4 KiB each jump first
walks the processor's page table, and in a virtual machine two of them. Measured on two cores at once, scattered pages of 6 KiB: 14
GB/s a core, and 22 with pages of 2 MiB under them.
"""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

_MADV_HUGEPAGE = 14
_HUGE = 2 * 2**20


def advise_huge_pages(tensor: Tensor) -> bool:
    """Ask the system to back the tensor's memory with large pages; best before it is first written. Whether it agreed.

    A hint: nothing changes but speed, and systems that know no such pages, or forbid them, say no.
    """
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    begin = -(-storage.data_ptr() // _HUGE) * _HUGE
    size = storage.data_ptr() + storage.nbytes() - begin
    if size < _HUGE:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise(begin, size // _HUGE * _HUGE, _MADV_HUGEPAGE) == 0
