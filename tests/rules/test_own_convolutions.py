"""Which convolutions are kernels of our own, where what was measured decides: on Arm, and where images lie alike."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.capture import product_libraries
from ferrite.machines import NEOVERSE_N1
from tests.compare import compile_strict, reset

quick = pytest.mark.quick


# --- what was measured ------------------------------------------------------------------------------------------------

RESULTS = Path(__file__).parents[2] / "bench" / "results"
NOISE = 1.02


def measured(layout: str) -> dict[tuple[int, ...], float]:
    """Sizes of convolutions, and our time to that of torch: the geometric mean of one thread and two."""
    found: dict[tuple[int, ...], list[float]] = {}
    for threads in ("", "-2-threads"):
        for line in (RESULTS / f"convolutions{layout}{threads}-aarch64.md").read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 11 and cells[1].isdigit():
                found.setdefault(tuple(map(int, cells[1:6])), []).append(float(cells[-1].split()[0]))
    assert all(len(ratios) == 2 for ratios in found.values())
    return {sizes: statistics.geometric_mean(ratios) for sizes, ratios in found.items()}


@quick
@pytest.mark.parametrize("layout", ["", "-last"])
def test_nothing_is_taken_alone_that_was_measured_to_be_slower(layout):
    def is_taken(inputs: int, outputs: int, size: int, window: int, step: int) -> bool:
        return NEOVERSE_N1.beside_torch["Arm Compute Library"].lone_convolution(window**2) is None

    rows = measured(layout)
    taken = {sizes: ratio for sizes, ratio in rows.items() if is_taken(*sizes)}
    assert len(taken) >= 15
    assert {sizes: ratio for sizes, ratio in taken.items() if ratio > NOISE} == {}


# --- which are taken --------------------------------------------------------------------------------------------------


@pytest.fixture
def on_arm(monkeypatch):
    monkeypatch.setattr(product_libraries, "uses_arm_compute_library", lambda: True)


def owned(fn, *inputs, **options) -> int:
    """How many convolutions are kernels of our own."""
    reset()
    compile_strict(fn, options=options)(*inputs)
    return ferrite.last_compile().rewrites.get("own_convolution", 0)


def bottleneck(x, narrow, window, wide, shortcut, mean, scale):
    """A block of ResNet: windows between two convolutions of one by one, and one beside them."""
    y = F.batch_norm(F.conv2d(x, narrow), mean[:16], scale[:16]).relu()
    y = F.batch_norm(F.conv2d(y, window, padding=1), mean[:16], scale[:16]).relu()
    y = F.batch_norm(F.conv2d(y, wide), mean, scale)
    return (y + F.conv2d(x, shortcut)).relu()


def bottleneck_inputs():
    shapes = (1, 32, 24, 24), (16, 32, 1, 1), (16, 16, 3, 3), (64, 16, 1, 1), (64, 32, 1, 1)
    return [*map(torch.randn, shapes), torch.randn(64), torch.rand(64) + 1]


@pytest.mark.usefixtures("on_arm")
def test_all_of_a_block_are_ours():
    with torch.no_grad():
        assert owned(bottleneck, *bottleneck_inputs()) == 4
        assert owned(bottleneck, *bottleneck_inputs(), own_convolutions="off") == 0


@pytest.mark.usefixtures("on_arm")
def test_one_by_one_alone_is_left():
    x, weight = torch.randn(1, 32, 24, 24), torch.randn(32, 32, 1, 1)
    with torch.no_grad():
        assert owned(lambda x, w: F.conv2d(x, w).relu(), x, weight) == 0
        assert owned(lambda x, w: F.conv2d(x, w).relu(), x.to(memory_format=torch.channels_last), weight) == 0


@pytest.mark.usefixtures("on_arm")
@pytest.mark.parametrize("side", [3, 5])
def test_windows_of_each_channel_have_those_of_one_by_one_with_them(side):
    def convolved(x, weight, each):
        return F.conv2d(F.conv2d(x, weight), each, groups=32).relu()

    def squeezed(*given):
        y = convolved(*given)
        return y * y.mean((2, 3), keepdim=True).sigmoid()

    given = torch.randn(1, 32, 24, 24), torch.randn(32, 32, 1, 1), torch.randn(32, 1, side, side)
    with torch.no_grad():
        assert owned(convolved, *given) == 1
        assert owned(squeezed, *given) == 0


@pytest.mark.usefixtures("on_arm")
def test_windows_of_groups_are_ours_and_have_those_of_one_by_one_with_them():
    given = torch.randn(1, 32, 24, 24), torch.randn(32, 32, 1, 1), torch.randn(32, 8, 3, 3)
    with torch.no_grad():
        assert owned(lambda x, w, e: F.conv2d(F.conv2d(x, w), e, groups=4), *given) == 2


@pytest.mark.usefixtures("on_arm")
def test_images_that_training_keeps_are_left():
    given = bottleneck_inputs()
    with torch.no_grad():
        assert owned(lambda x, w: F.conv2d(x * 2, w), given[0][:, :16], given[2]) == 1
    weight = given[2].requires_grad_()
    assert owned(lambda x, w: F.conv2d(x * 2, w), given[0][:, :16], weight) == 0


@pytest.mark.skipif(product_libraries.has_arm_compute_library(), reason="it is measured here")
def test_elsewhere_torch_keeps_them():
    with torch.no_grad():
        assert owned(bottleneck, *bottleneck_inputs()) == 0
