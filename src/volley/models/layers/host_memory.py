"""Memory that loading leaves behind: pages of files that were read once, and memory that the allocator keeps."""

import mmap
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from volley.native.pages import DONT_NEED, ON_LINUX, advise, c_library

_TRIMMED_FROM, _MAPPED_FROM = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_LARGEST_KEPT = 8 * 2**20  # glibc's own rule ends at 32 MiB


class MappedFiles:
    """Snapshot of the files that are mapped into this process."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        lines = Path("/proc/self/maps").read_text().splitlines() if ON_LINUX else []
        for line in lines:
            addresses, _, _, _, inode, *_ = line.split()
            if inode != "0":
                begin, end = (int(address, 16) for address in addresses.split("-"))
                self._ranges.append((begin, end))

    def covers(self, begin: int, end: int) -> bool:
        """Return whether addresses ``[begin, end)`` lie in one file."""
        place = bisect_right(self._ranges, (begin, sys.maxsize)) - 1
        return place >= 0 and self._ranges[place][0] <= begin and end <= self._ranges[place][1]

    def forget(self, weight: Tensor) -> None:
        """Give back the memory of a weight in a mapped file; a later access reads the file again."""
        if weight.device.type == "cpu" and weight.is_contiguous():
            self.forget_bytes(weight.data_ptr(), weight.nbytes)

    def forget_bytes(self, address: int, size: int) -> None:
        """Give back the whole pages of an address range, if it lies in a mapped file."""
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end and self.covers(begin, end):
            advise(begin, end - begin, DONT_NEED)

    def forget_all(self, module: nn.Module) -> None:
        """Give back the memory of every weight of a module in a mapped file."""
        for weight in module.parameters():
            self.forget(weight)


def forget_libraries() -> None:
    """Give back the pages of shared libraries that were only read, mostly once, during loading.

    A later access reads them from their files again. A mapping that is writable, or has a written page, stays.
    """
    if not ON_LINUX:
        return
    begin, end, is_read = 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            permissions, _, _, inode, *_ = rest.split()
            begin, end = (int(address, 16) for address in name.split("-"))
            is_read = inode != "0" and "w" not in permissions and ".so" in line
        elif name == "Anonymous:" and is_read and rest.split()[0] == "0":
            advise(begin, end - begin, DONT_NEED)


class StackedRows:
    """Stacked weights, read some rows at a time; rows that were read leave memory if they lie in one of ``files``."""

    def __init__(self, weights: Sequence[Tensor], files: MappedFiles | None) -> None:
        self._weights = [weight.detach() for weight in weights]
        self._files = files
        self.shape = sum(map(len, weights)), weights[0].shape[1]

    def __getitem__(self, rows: slice) -> Tensor:
        """Copy rows ``[start, stop)``: ``[n, in]``."""
        begin, parts = 0, []
        for weight in self._weights:
            parts.append(weight[max(rows.start - begin, 0) : max(rows.stop - begin, 0)])
            begin += len(weight)
        copied = torch.cat(parts)
        if self._files is not None:
            for part in parts:
                self._files.forget(part)
        return copied


@contextmanager
def returning_memory() -> Iterator[None]:
    """Return memory to the system while a model is loaded.

    The pages of libraries are given back before and after. Inside, large freed blocks go to the system at once, and all other
    free memory at the end. glibc otherwise keeps freed memory for allocations of the same size. It does so again afterwards, but
    keeps less than by its default rule.
    """
    forget_libraries()
    library = c_library()
    if not (ON_LINUX and hasattr(library, "mallopt")):
        yield
        return
    library.mallopt(_MAPPED_FROM, 2**20)
    try:
        yield
    finally:
        library.mallopt(_MAPPED_FROM, _LARGEST_KEPT)
        library.mallopt(_TRIMMED_FROM, 2 * _LARGEST_KEPT)
        trim()
        forget_libraries()


@contextmanager
def trimmed() -> Iterator[None]:
    """Return free memory to the system after a body that fills much memory once."""
    try:
        yield
    finally:
        trim()


def trim() -> None:
    """Return the allocator's free memory to the system, where it supports that."""
    if ON_LINUX and hasattr(c_library(), "malloc_trim"):
        c_library().malloc_trim(0)
