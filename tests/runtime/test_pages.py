"""Large results are in memory for which large pages were asked."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import ferrite
from ferrite.runtime.cpu import pages
from tests.compare import compile_strict


def flags_at(address: int) -> set[str]:
    """What the system says of the mapping that holds an address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            here = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif here and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    return set()


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux has them")
def test_large_pages_are_asked_for():
    torch.compiler.reset()
    x = torch.randn(4096, 2304)
    double, summed = compile_strict(lambda x: x * 2), compile_strict(lambda x: x.sum(0))
    assert torch.equal(double(x), x * 2)
    assert "large_on_cpu((4096, 2304)" in ferrite.last_compile().graphs[0].source
    result = double(x)
    middle = result.data_ptr() + result.nbytes // 2
    assert flags_at(middle) & {"hg"}
    summed(x)
    assert "large_on_cpu" not in ferrite.last_compile().graphs[0].source


def test_small_ones_have_what_they_have():
    compile_strict(lambda x: x * 2)(torch.randn(100))
    assert "empty_on_cpu((100,)" in ferrite.last_compile().graphs[0].source


@pytest.mark.parametrize("sizes", [(), (0,), (3,), (5000,)])
def test_any_size_will_do(sizes):
    strides = tuple(1 for _ in sizes)
    assert pages.large_on_cpu(sizes, strides, torch.float64).shape == sizes
