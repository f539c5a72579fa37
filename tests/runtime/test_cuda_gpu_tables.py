"""torch's own tables on a GPU, through the front door: every entry in one of its types and layouts each time, all of
them in the long sweep. On the CPU it is `tests/lower/test_tables.py`.

Calls that eager refuses are not here: an index that points outside ends the work of the process on the GPU.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's operator samples need it")

from tests.tables.entries import Entry, dtypes_of, entries, samples
from tests.tables.layouts import LAYOUTS
from tests.tables.together import AT_ONCE, verdicts
from tests.triton_kernels import ON_A_GPU

pytestmark = [*ON_A_GPU, pytest.mark.usefixtures("few_processes"), pytest.mark.filterwarnings("ignore")]
DEVICE = "cuda"
# Of the entries, one in so many is asked in this way each time; and the tests that share them.
ONE_IN = {"static": 1, "backward": 1, "dynamic": 8, "in place": 8}
PARTS = {"static": 64, "backward": 48, "dynamic": 24, "in place": 4}
LAYOUT_NAMES = list(LAYOUTS)
# Compared with eager they are of no use. Its CUDA kernels of these have a sixth as a 32-bit float, in 64 bits too.
INEXACT_IN_DOUBLE = ("op:nn.functional.hardswish", "op:nn.functional.hardsigmoid")
Asked = tuple[Entry, torch.dtype, str, int]


def chosen(way: str, device: str = DEVICE) -> list[Asked]:
    """Entries with their types in turn, with arguments laid out in turn (every other one as the table has them), and
    with the number of a sample."""
    found = []
    for place, entry in enumerate(entries(device).values()):
        types = types_of(entry, way)
        if not types or place % ONE_IN[way]:
            continue
        turn = place // ONE_IN[way]
        layout = LAYOUT_NAMES[turn // 2 % len(LAYOUT_NAMES)] if turn % 2 else "as given"
        layout = layout if layout in layouts_of(entry, way) else "as given"
        found.append((entry, types[turn % len(types)], layout, turn % 3))
    return found


def types_of(entry: Entry, way: str) -> list[torch.dtype]:
    """Without optimizers: powers of their betas are numbers of 32 bits where they are traced, whatever the backend, and
    differences from 1 make much of how these are rounded."""
    known = set() if entry.kind == "optimizer" else dtypes_of(entry, way)
    return sorted(known - {torch.float64} if entry.name in INEXACT_IN_DOUBLE else known, key=str)


def layouts_of(entry: Entry, way: str) -> list[str]:
    """Where rows are equal, which of them a gradient belongs to is chance; and strides of nothing are others where
    eager takes many tensors at once."""
    left_out = set() if entry.takes_edges else {"edges"}
    left_out |= {"expanded"} if way == "backward" else set()
    left_out |= {"empty", "hollow"} if entry.name.startswith("foreach:") else set()
    return [name for name in LAYOUT_NAMES if name not in left_out]


def failures(asked: list[Asked], way: str) -> list[str]:
    """What is not as in eager, of the samples with these numbers, or the last ones before."""
    named, given = [], []
    for entry, dtype, layout, number in asked:
        for sample in list(samples(entry, dtype, way, number + 1))[-1:]:
            named.append(f"{entry.name} {str(dtype)[6:]} {layout}")
            given.append((entry, sample, layout))
    found = zip(named, verdicts(given, way), strict=True)
    return [f"{name}: {verdict.kind}: {verdict.why}" for name, verdict in found if verdict.failed]


@pytest.mark.parametrize(("way", "part"), [(way, part) for way in PARTS for part in range(PARTS[way])])
def test_a_sample_of_every_entry(way, part):
    assert failures(chosen(way)[part :: PARTS[way]], way) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", PARTS)
@pytest.mark.parametrize("name", list(entries()))
def test_every_entry(name, way):
    entry = entries(DEVICE)[name]
    found = []
    for dtype in types_of(entry, way):
        for layout in layouts_of(entry, way):
            given = [(entry, sample, layout) for sample in samples(entry, dtype, way, AT_ONCE["dynamic"])]
            found += [(dtype, layout, verdict) for verdict in verdicts(given, way) if verdict.failed]
    assert found == []
