"""Which matrix products are kernels of our own: what was measured decides, and the record of that is held here."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrite.passes.shared.own_products import MAX_SUMMED, can_be_cut, slower_than_torch
from ferrite.schedule.cpu import products

quick = pytest.mark.quick
RESULTS = Path(__file__).parents[2] / "bench" / "results"
RECORDS = [RESULTS / "products-aarch64.md", RESULTS / "products-2-threads-aarch64.md"]
ALONG = ("linear", "layer", "scores")  # both factors lie along what is summed
NOISE = 1.02


def measured() -> list[tuple[str, list[int], float]]:
    """Kind, rows and inner and columns, and our time to torch's."""
    found = []
    for line in "\n".join(record.read_text() for record in RECORDS).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[1][:1].isdigit():
            found.append((cells[0], [int(size) for size in cells[1].split(",")][-3:], float(cells[4].split()[0])))
    return found


@quick
def test_nothing_is_taken_that_was_measured_to_be_slower():
    rows = measured()
    assert len(rows) > 80
    for kind, sizes, ratio in rows:
        if slower_than_torch(*sizes, lie_along=kind in ALONG) is None:
            assert ratio <= NOISE, (kind, sizes)


@quick
def test_most_of_what_was_measured_to_be_faster_is_taken():
    faster = [(kind, sizes) for kind, sizes, ratio in measured() if ratio < 0.9]
    taken = [sizes for kind, sizes in faster if slower_than_torch(*sizes, lie_along=kind in ALONG) is None]
    assert len(taken) > 0.6 * len(faster)


@quick
def test_a_reason_is_given():
    assert "small" in str(slower_than_torch(5, 4, 6, True))
    assert "thin" in str(slower_than_torch(4, 768, 768, False))
    assert "large" in str(slower_than_torch(512, 768, 768, False))
    assert slower_than_torch(128, 768, 768, True) is None


@quick
def test_the_scheduler_takes_what_the_pass_makes():
    """Else a product would be an ordinary sum, which is right and slow."""
    assert MAX_SUMMED == products.MAX_SUMMED
    for length in range(1, 4096):
        assert can_be_cut(length) == (products.piece_of(length, products.MAX_PACKED) <= products.MAX_PACKED)
