"""Convolutions as kernels of our own: windows in tiles of a product, and what follows inside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.ir.kernel import Accumulate, Scratch, Store, walk
from ferrite.ir.kernel.interpret import run_kernel
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.machines import host_machine
from ferrite.passes.freezing.panels import panels_of
from tests.cases import seldom
from tests.compare import assert_same_as_eager, compile_strict, reset
from tests.schedule.plans import loops, plan_of

quick = pytest.mark.quick
OWN = {"own_convolutions": "always", "check_bounds": True}


def windowed(x, weight):
    """What a convolution is of channels that lie side by side, spelled out: no pass is needed to see it."""
    windows = x.unfold(1, 3, 1).unfold(2, 3, 1)  # n, h, w, k, i, j
    return (windows[:, :, :, None] * weight).sum((-3, -2, -1))


# --- loops ------------------------------------------------------------------------------------------------------------


@quick
@pytest.mark.lengthy
def test_registers_hold_a_tile_of_sums():
    x, weight = torch.randn(2, 5, 6, 4), torch.randn(18, 4, 3, 3)
    (launch,) = plan_of(windowed, x, weight).launches
    kernel = launch.kernel
    states = [item for item in walk(kernel.body) if isinstance(item, Accumulate)]
    assert len(states) == 2  # the places of both images are whole tiles, the channels are not
    assert [loop.copies for loop in loops(kernel, "vector") if states[0] in walk(loop.body)] == [4, 4]
    assert len({item.name for item in walk(kernel.body) if isinstance(item, Scratch)}) == 3  # sums, and two panels
    assert parse_kernel(str(kernel)) == kernel
    memory = [torch.full([2 * 3 * 4 * 18], float("nan")), x.flatten(), weight.flatten()]
    run_kernel(kernel, memory)
    expected = F.conv2d(x.permute(0, 3, 1, 2), weight).permute(0, 2, 3, 1)
    torch.testing.assert_close(memory[0].view(expected.shape), expected)


@quick
@pytest.mark.lengthy
def test_weights_in_panels_are_read_as_they_are():
    def convolved(x, panels):
        return torch.ops.ferrite.convolution_of_panels(x.permute(0, 3, 1, 2), panels, 40, [1, 1], [0, 0], [1, 1])

    width = host_machine().panel_columns(torch.float32)
    x, weight = torch.randn(1, 6, 7, 4), torch.randn(40, 4, 3, 3)
    panels = panels_of(weight.permute(2, 3, 1, 0))
    assert panels.shape == (-(-40 // width), 3, 3, 4, width)
    (launch,) = plan_of(convolved, x, panels).launches
    if width == 16:  # with wider vectors images may be packed
        assert sum(isinstance(item, Scratch) for item in walk(launch.kernel.body)) == 1  # sums, and nothing else
    memory = [torch.full([4 * 5 * 40], float("nan")), x.flatten(), panels.flatten()]
    run_kernel(launch.kernel, memory)
    expected = F.conv2d(x.permute(0, 3, 1, 2), weight).permute(0, 2, 3, 1)
    torch.testing.assert_close(memory[0].view(expected.shape), expected)


def has_squares(fn, *inputs):
    """Whether lanes are channels and as many copies are places: results are turned in registers."""
    kernel = plan_of(fn, *inputs).launches[-1].kernel
    stores = [item for item in walk(kernel.body) if isinstance(item, Store) and item.buffer == kernel.pointers[0].name]
    (around,) = ([loop for loop in loops(kernel, "vector") if store in walk(loop.body)] for store in stores)
    return [(loop.lanes, loop.copies) for loop in around] == [(1, 4), (4, 1)]


@quick
def test_results_that_lie_by_places_are_turned_in_registers():
    x, weight, residual = torch.randn(1, 6, 7, 4), torch.randn(40, 4, 3, 3), torch.randn(1, 40, 4, 5)

    def convolved(x, weight, bias):
        found = torch.ops.ferrite.convolution(x.permute(0, 3, 1, 2), weight, [1, 1], [0, 0], [1, 1])
        return (found + bias[:, None, None]).contiguous()

    assert has_squares(convolved, x, weight, residual[0, :, 0, 0])
    # what is read by places, too, is not read across
    assert not has_squares(lambda *given: convolved(*given[:3]) + given[3], x, weight, residual[0, :, 0, 0], residual)


# --- values -----------------------------------------------------------------------------------------------------------

# image, weight, and how windows go over it
WINDOWS = {
    "three by three": ((1, 8, 9, 10), (20, 8, 3, 3), {"padding": 1}),
    "one by one": ((2, 24, 5, 7), (19, 24, 1, 1), {}),
    "one by one, every other": ((1, 32, 9, 6), (16, 32, 1, 1), {"stride": 2}),
    "three channels, every other": ((1, 3, 15, 17), (10, 3, 7, 7), {"stride": 2, "padding": 3}),
    "taps apart": ((2, 5, 11, 12), (6, 5, 3, 3), {"dilation": 2, "padding": (2, 1)}),
    "odd windows": ((1, 6, 8, 9), (7, 6, 2, 5), {"padding": (0, 2), "stride": (1, 3)}),
    "in pieces": ((1, 128, 4, 5), (8, 128, 3, 3), {"padding": 1}),
    "in many pieces": ((1, 1024, 3, 3), (5, 1024, 1, 1), {}),
    "several blocks": ((1, 4, 40, 45), (200, 4, 2, 2), {}),
    "two places": ((1, 16, 1, 2), (2, 16, 1, 1), {}),
    "one dimension": ((2, 8, 30), (12, 8, 5), {"padding": 2}),
    "one dimension, one image": ((1, 8, 30), (12, 8, 5), {}),
    "three dimensions": ((1, 3, 5, 6, 4), (8, 3, 3, 3, 3), {"padding": 1}),
    "groups": ((2, 24, 7, 6), (18, 8, 3, 3), {"padding": 1, "groups": 3}),
    "many groups, every other": ((1, 40, 9, 9), (50, 4, 3, 3), {"stride": 2, "groups": 10}),
    "groups in pieces": ((1, 512, 3, 4), (40, 256, 2, 2), {"groups": 2}),
    "groups, one by one": ((2, 64, 5, 3), (12, 16, 1, 1), {"groups": 4}),
    "groups in one dimension": ((1, 24, 30), (12, 8, 5), {"padding": 2, "groups": 3}),
    "patches": ((1, 4, 16, 12), (9, 4, 4, 4), {"stride": 4}),
}
CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


SELDOM = (
    "one by one, every other",
    "taps apart",
    "in many pieces",
    "several blocks",
    "two places",
    "one dimension",
    "groups",
)
SELDOM += ("groups in pieces", "groups in one dimension", "patches")


@pytest.mark.parametrize("case", seldom(WINDOWS, *SELDOM))
def test_convolutions_of_any_windows(case):
    image, weight, how = WINDOWS[case]

    def convolved(x, weight, bias):
        return CONVOLUTIONS[x.ndim](x, weight, bias, **how)

    def inputs():
        return [torch.randn(image), torch.randn(weight), torch.randn(weight[0])]

    assert_same_as_eager(convolved, inputs, options=OWN, terms=4.0)
    assert ferrite.last_compile().rewrites["own_convolution"] == 1


@pytest.mark.parametrize("image", [torch.contiguous_format, torch.channels_last], ids=["by places", "by channels"])
@pytest.mark.parametrize("weight", [torch.contiguous_format, torch.channels_last], ids=["by places", "by channels"])
def test_layouts(image, weight):
    def convolved(x, w):
        return F.conv2d(x, w, padding=1), F.conv2d(x, w).relu()

    def inputs():
        x, w = torch.randn(2, 12, 7, 6), torch.randn(18, 12, 3, 3)
        return x.to(memory_format=image), w.to(memory_format=weight)

    assert_same_as_eager(convolved, inputs, options=OWN, terms=4.0)


def test_views_of_images():
    def convolved(x, weight):
        return F.conv2d(x[:, 1:9, ::2], weight), F.conv2d(x.transpose(2, 3)[:1, :8], weight[:, :, :1, 1:2])

    assert_same_as_eager(convolved, lambda: [torch.randn(2, 10, 9, 8), torch.randn(6, 8, 3, 3)], options=OWN, terms=4.0)


@pytest.mark.parametrize("channels", [3, 16, 18, 50])
def test_results_by_places_with_a_residual(channels):
    def convolved(x, w, residual):
        y = F.conv2d(x, w, padding=1)
        return y.relu(), y + residual

    def inputs():
        return [torch.randn(2, 5, 7, 6), torch.randn(channels, 5, 3, 3), torch.randn(2, channels, 7, 6)]

    assert_same_as_eager(convolved, inputs, options=OWN, terms=4.0)


SEVERAL = pytest.param((2, 20, 11, 10), id="(2, 20, 11, 10)", marks=pytest.mark.slow)
LOW = pytest.param((1, 70, 1, 30), id="(1, 70, 1, 30)", marks=pytest.mark.slow)


@pytest.mark.parametrize("how", [{"padding": 2}, {"stride": 2}, {"padding": (1, 2), "dilation": 2}], ids=str)
@pytest.mark.parametrize("shape", [SEVERAL, (1, 70, 9, 13), LOW], ids=str)
def test_windows_of_each_channel_between_convolutions_of_our_own(shape, how):
    batch, channels, height, width = shape
    window = (5, 5) if height > 1 else (1, 5)
    how = {name: value if height > 1 else (0, 2) if name == "padding" else 1 for name, value in how.items()}

    def convolved(x, narrow, each, wide):
        y = F.conv2d(F.conv2d(x, narrow).relu(), each, groups=channels, **how)
        return F.conv2d(y.relu(), wide)

    def inputs():
        shapes = (batch, 16, height, width), (channels, 16, 1, 1), (channels, 1, *window), (17, channels, 1, 1)
        return [torch.randn(shape) / shape[1] ** 0.5 for shape in shapes]

    assert_same_as_eager(convolved, inputs, options=OWN, terms=16.0)
    assert ferrite.last_compile().rewrites["own_convolution"] == 2


def test_doubles():
    def inputs():
        return [torch.randn(1, 70, 6, 6, dtype=torch.float64), torch.randn(9, 70, 3, 3, dtype=torch.float64)]

    assert_same_as_eager(lambda x, w: F.conv2d(x, w, padding=1), inputs, options=OWN, terms=256.0)


def test_infinities_and_none_stay_in_their_windows():
    x, weight = torch.randn(1, 64, 9, 9), torch.randn(20, 64, 3, 3)
    x[0, 3, 4, 4], x[0, 5, 0, 8] = float("inf"), float("nan")
    made = compile_strict(lambda x, w: F.conv2d(x, w, padding=1), options=OWN)(x, weight)
    exact = F.conv2d(x.double(), weight.double(), padding=1).float()
    torch.testing.assert_close(made, exact, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_threads_do_not_change_a_bit():
    x, weight = torch.randn(1, 64, 30, 30), torch.randn(128, 64, 3, 3)
    convolved = compile_strict(lambda x, w: F.conv2d(x, w, padding=1), options={"own_convolutions": "always"})
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(convolved(x, weight))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# --- what follows -----------------------------------------------------------------------------------------------------


def kernels(fn, *inputs, **options) -> list[set[str]]:
    """The operators in each kernel."""
    reset()
    with torch.no_grad():
        compile_strict(fn, options={**OWN, **options})(*inputs)
    return [set(kernel.operators) for kernel in ferrite.last_compile().kernels]


def block(x, first, second, scale, shift):
    """Two layers with normalisation and a residual."""
    y = F.conv2d(x, first)
    y = F.batch_norm(y, shift, scale.abs() + 1, scale, shift).relu()
    y = F.conv2d(y, second, padding=1)
    y = F.batch_norm(y, shift, scale.abs() + 1, scale, shift)
    return (y + x).relu()


def block_inputs(layout=torch.contiguous_format):
    x, first, second = torch.randn(2, 16, 6, 7), torch.randn(16, 16, 1, 1), torch.randn(16, 16, 3, 3)
    return [x.to(memory_format=layout), first, second, torch.randn(16), torch.randn(16)]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["by places", "by channels"])
def test_a_block_of_layers(layout):
    assert_same_as_eager(block, lambda: block_inputs(layout), options=OWN, terms=4.0)


@pytest.mark.parametrize("step", [1, 2])
def test_windows_of_each_channel_between(step):
    """They go as the images do which our kernels write: by channels, several windows at once."""

    def inverted(x, first, each, last):
        y = F.conv2d(F.conv2d(x, first).relu(), each, padding=1, stride=step, groups=24)
        y = F.conv2d(F.pad(y.relu(), (0, 1, 0, 1)), each, groups=24)
        return F.conv2d(y, last)

    def inputs():
        return [
            torch.randn(1, 16, 9, 11),
            torch.randn(24, 16, 1, 1),
            torch.randn(24, 1, 3, 3),
            torch.randn(8, 24, 1, 1),
        ]

    assert_same_as_eager(inverted, inputs, options=OWN, terms=64.0)


def test_what_follows_a_convolution_is_in_its_kernel():
    def layer(x, weight, bias, residual):
        return (F.conv2d(x, weight, bias, padding=1) + residual).relu()

    def inputs():
        x, residual = torch.randn(2, 16, 6, 7), torch.randn(2, 12, 6, 7)
        laid = [item.to(memory_format=torch.channels_last) for item in (x, residual)]
        return [laid[0], torch.randn(12, 16, 3, 3), torch.randn(12), laid[1]]

    assert_same_as_eager(layer, inputs, options=OWN, terms=4.0)
    edges, layers = kernels(layer, *inputs())
    assert {"convolution_default", "relu"} <= layers
    assert "relu" not in edges


def test_gradients():
    def loss(x, weight, bias):
        return F.conv2d(x, weight, bias, padding=1).relu().square().mean()

    def inputs():
        return [item.requires_grad_() for item in (torch.randn(2, 8, 6, 7), torch.randn(12, 8, 3, 3), torch.randn(12))]

    assert_same_as_eager(loss, inputs, backward=True, options=OWN, terms=4.0)


def test_torch_keeps_its_kernel():
    x, weight = torch.randn(1, 8, 6, 7), torch.randn(12, 8, 3, 3)

    def convolved(x, weight):
        return F.conv2d(x, weight)

    assert kernels(convolved, x, weight)
    assert not kernels(convolved, x, weight, own_convolutions="off")
    assert not kernels(convolved, x, weight, numerics="strict")
    assert not kernels(convolved, x.bfloat16(), weight.bfloat16())
