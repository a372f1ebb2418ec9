"""What loading leaves in memory: pages of files that were read once, and what the allocator keeps after it."""

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
    """The files that are mapped into this process, as they were when this was made."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        lines = Path("/proc/self/maps").read_text().splitlines() if ON_LINUX else []
        for line in lines:
            addresses, _, _, _, inode, *_ = line.split()
            if inode != "0":
                begin, end = (int(address, 16) for address in addresses.split("-"))
                self._ranges.append((begin, end))

    def covers(self, begin: int, end: int) -> bool:
        """Whether addresses ``[begin, end)`` lie in one file."""
        place = bisect_right(self._ranges, (begin, sys.maxsize)) - 1
        return place >= 0 and self._ranges[place][0] <= begin and end <= self._ranges[place][1]

    def forget(self, weight: Tensor) -> None:
        """Give back the memory of a weight that lies in a mapped file; the file is read again should anybody ask for it."""
        if weight.device.type == "cpu" and weight.is_contiguous():
            self.forget_bytes(weight.data_ptr(), weight.nbytes)

    def forget_bytes(self, address: int, size: int) -> None:
        """Give back the memory of all whole pages of some bytes, if they lie in a mapped file."""
        begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end and self.covers(begin, end):
            advise(begin, end - begin, DONT_NEED)

    def forget_all(self, module: nn.Module) -> None:
        """Give back the memory of every weight of a module that lies in a mapped file."""
        for weight in module.parameters():
            self.forget(weight)


def forget_libraries() -> None:
    """Give back the pages of shared libraries that were only read, mostly once, while they were loaded.

    They come again from their files where they are needed. A mapping that may be written to, or with a page that was, stays.
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
    """Weights one below the other, read some rows at a time; what was read leaves memory if it lies in one of ``files``."""

    def __init__(self, weights: Sequence[Tensor], files: MappedFiles | None) -> None:
        self._weights = [weight.detach() for weight in weights]
        self._files = files
        self.shape = sum(map(len, weights)), weights[0].shape[1]

    def __getitem__(self, rows: slice) -> Tensor:
        """A copy ``[n, in]`` of rows ``[start, stop)``."""
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
def giving_back() -> Iterator[None]:
    """Forget what was read of libraries, before and after; inside, what is freed in large parts goes back to the system at once.

    With the end goes what else is free. glibc otherwise keeps freed memory for allocations of the same size; so it does again
    afterwards, but less than by its own rule.
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
    """Around what fills much memory once: what is free at its end is returned to the system."""
    try:
        yield
    finally:
        trim()


def trim() -> None:
    """Return what the allocator keeps for later to the system, where that can be asked for."""
    if ON_LINUX and hasattr(c_library(), "malloc_trim"):
        c_library().malloc_trim(0)
