"""The caches of this machine's first processor, as Linux tells them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MIN_L2_SHARE, MAX_L2_SHARE = 1 << 18, 1 << 21  # what is told beyond is not believed: virtual machines tell anything
HARDWARE_THREADS = 2  # of a core, which share its caches; kernels use one of them


@dataclass(frozen=True)
class Cache:
    bytes: int
    ways: int
    threads: int  # that share it

    @property
    def way_bytes(self) -> int:
        return self.bytes // self.ways

    @property
    def share(self) -> int:
        """What a kernel counts on: half of what its core has. The rest is for code, the stack, and what passes by."""
        cores = max(self.threads // HARDWARE_THREADS, 1)
        return min(max(self.bytes // cores // 2, MIN_L2_SHARE), MAX_L2_SHARE)


@functools.cache
def data_caches(folder: Path = FOLDER) -> dict[int, Cache]:
    """By level; those of which all is told."""
    found = {}
    for each in sorted(folder.glob("index*")):
        try:
            if (each / "type").read_text().strip() != "Instruction":
                found[int((each / "level").read_text())] = cache_in(each)
        except (OSError, ValueError):
            continue
    return found


def cache_in(folder: Path) -> Cache:
    """ValueError where it says nothing that can be true."""
    size, ways = (folder / "size").read_text().strip(), int((folder / "ways_of_associativity").read_text())
    number = int(size.rstrip("KMG")) * UNITS.get(size[-1:], 1)
    if number <= 0 or ways <= 0 or number % ways:
        raise ValueError(f"a cache of {size} in {ways} ways")
    return Cache(number, ways, count_of((folder / "shared_cpu_list").read_text()))


def count_of(ranges: str) -> int:
    """How many numbers such a list has: of `0-3,8` five."""
    ends = [[int(end) for end in each.split("-")] for each in ranges.strip().split(",")]
    return sum(each[-1] - each[0] + 1 for each in ends)
