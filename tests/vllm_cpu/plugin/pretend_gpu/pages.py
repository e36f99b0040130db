"""vLLM's sleep-mode allocator for host memory: a sleeping tensor keeps its address and loses its pages.

That is what vLLM's CUDA allocator does with the driver's virtual memory calls; here `madvise` does it.  It has the
methods of vLLM's `MemAllocator` that sleeping needs, and books what is mapped in the device's ledger.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence

import torch

from .ledger import Ledger, NoRoomError

PAGE = os.sysconf("SC_PAGESIZE")
CHUNK = 64 << 20  # one read or write moves at most 2 GiB
MADV_DONTNEED = 4
WAKE_OUT_OF_MEMORY = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:175"

libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Allocation:
    """One tensor storage.  Its whole pages can be given back; the rims to both sides share a page with other data."""

    def __init__(self, address: int, size: int, tag: str) -> None:
        self.address, self.size, self.tag = address, size, tag
        self.first_page = -(-address // PAGE) * PAGE
        self.pages_size = max(0, (address + size) // PAGE * PAGE - self.first_page)
        self.is_asleep = False
        self._backup: int | None = None  # descriptor of a memfd: the "host RAM" of a level 1 sleep

    def offload(self) -> None:
        """Keep a copy of the pages outside, then give them back."""
        self._backup = os.memfd_create("pretend-gpu-backup")
        for chunk in self._chunks():
            while chunk:
                chunk = chunk[os.write(self._backup, chunk) :]
        self._release()

    def discard(self) -> None:
        """Give the pages back and lose what was in them and on the rims."""
        if not self.pages_size:
            ctypes.memset(self.address, 0, self.size)
        else:
            behind = self.first_page + self.pages_size
            ctypes.memset(self.address, 0, self.first_page - self.address)
            ctypes.memset(behind, 0, self.address + self.size - behind)
        self._release()

    def restore(self) -> None:
        """Take pages again, filled with the copy if there is one, else with zeros."""
        if self._backup is None:
            ctypes.memset(self.first_page, 0, self.pages_size)  # writing is what makes the kernel map them
        else:
            os.lseek(self._backup, 0, os.SEEK_SET)
            for chunk in self._chunks():
                while chunk:
                    chunk = chunk[os.readv(self._backup, [chunk]) :]
            os.close(self._backup)
            self._backup = None
        self.is_asleep = False

    def _release(self) -> None:
        if self.pages_size and libc.madvise(self.first_page, self.pages_size, MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise")
        self.is_asleep = True

    def _chunks(self) -> Iterable[memoryview]:
        if not self.pages_size:
            return
        pages = memoryview((ctypes.c_char * self.pages_size).from_address(self.first_page)).cast("B")
        for start in range(0, self.pages_size, CHUNK):
            yield pages[start : start + CHUNK]


class PageAllocator:
    """All tracked memory of one worker process."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._allocations: dict[int, Allocation] = {}

    def track(self, tag: str, tensors: Iterable[torch.Tensor]) -> None:
        """Book the storages of these tensors.  Raises NoRoomError, and has booked nothing then."""
        new = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._allocations:
                new[storage.data_ptr()] = Allocation(storage.data_ptr(), storage.nbytes(), tag)
        self._ledger.take(sum(each.size for each in new.values()))
        self._allocations |= new

    def get_current_usage(self) -> int:
        return sum(each.size for each in self._allocations.values() if not each.is_asleep)

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Free everything; only memory with these tags is kept as a copy."""
        kept = (offload_tags,) if isinstance(offload_tags, str) else offload_tags or ()
        for each in self._awake():
            each.offload() if each.tag in kept else each.discard()
            self._ledger.give(each.size)
        libc.malloc_trim(0)  # what loading left behind would hide that memory was freed

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Free memory with these tags without a copy."""
        for each in self._awake():
            if each.tag in tags:
                each.discard()
                self._ledger.give(each.size)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Map memory again, one allocation after the other.

        As on a GPU a failure leaves mapped what was mapped so far; the same call goes on there once room is free.
        """
        for each in self._allocations.values():
            if each.is_asleep and (tags is None or each.tag in tags):
                try:
                    self._ledger.take(each.size)
                except NoRoomError as exc:
                    raise RuntimeError(WAKE_OUT_OF_MEMORY) from exc
                each.restore()

    def _awake(self) -> list[Allocation]:
        return [each for each in self._allocations.values() if not each.is_asleep]
