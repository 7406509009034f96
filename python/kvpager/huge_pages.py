"""Huge pages for pool and weights: fewer address translations where kernels jump from block to block, or read it all.

Linux gives them to anonymous memory that asks for them (`madvise`); elsewhere nothing is asked and nothing is lost.
"""

import ctypes
import mmap
import sys

from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20


def advise_huge_pages(tensor: Tensor) -> bool:
    """Ask for huge pages under a CPU tensor, before it is first written; says whether the system took the advice.

    Only whole huge pages within the tensor are advised, so no neighbour's memory is touched.
    """
    if not sys.platform.startswith("linux"):
        return False
    start = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    stop = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if stop <= start:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(start, stop - start, mmap.MADV_HUGEPAGE) == 0)
