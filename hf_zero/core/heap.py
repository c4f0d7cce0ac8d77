"""Gives memory that was freed in this process back to the system."""

from __future__ import annotations

import ctypes


class _Heap:
    """The memory that the C library keeps when it is freed.

    Here large tensors come and go between small things that stay, so that what was freed does not fit the next one:
    memory would grow to the size of the model. The library is told to give its free pages back from time to time.
    """

    _EVERY = 16 * 2**20

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        self._freed = 0

    def has_freed(self, nbytes: int) -> None:
        self._freed += nbytes
        if self._freed >= self._EVERY and self._trim is not None:
            self._trim(0)
            self._freed = 0


heap = _Heap()
