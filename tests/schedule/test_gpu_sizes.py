"""Kernels for a GPU where sizes are not known: what they have in common with those for known ones."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from ferrite.codegen.triton import kernel_source, launch_of
from ferrite.lower.graph import lower_graph
from ferrite.schedule.plan import make_plan
from tests.gpu_plans import FEW_PROGRAMS, TINY, assert_as_eager, plan_of, run_plan, scheduling

BF16 = torch.bfloat16


def made(*sizes, dtype=torch.float32):
    """Memory that nobody touches: only its form matters."""
    return torch.empty(sizes, dtype=dtype)


def sources(function, *inputs):
    plan = plan_of(function, *inputs, dynamic=True)
    assert not plan.not_compiled
    return [kernel_source(launch.kernel, "kernel") for launch in plan.launches]


# --- how wide indices are ---------------------------------------------------------------------------------------------


def test_indices_have_32_bits_where_the_host_sees_that_they_fit():
    (launch,) = plan_of(lambda x, y: x + y, made(100, 200), made(200), dynamic=True).launches
    assert "INDEX: tl.constexpr = tl.int32 if NARROW else tl.int64" in kernel_source(launch.kernel, "kernel")
    config = launch_of(launch.kernel, "kernel")
    for sizes, narrow in (([1 << 10, 1 << 20], 1), ([1 << 11, 1 << 20], 0), ([1 << 20, 1 << 11], 0), ([3, 1 << 31], 0)):
        assert config.constants(sizes)["NARROW"] == narrow
    assert config.constants(None)["NARROW"] == 1, "code is made for what is likely"


def test_what_is_computed_of_places_has_64_bits():
    """Three million times a place: 32 bits do not hold that of 1000 elements, though these are few."""

    def function(x):
        return torch.arange(x.shape[0]) * 3000000 + x, torch.arange(x.shape[0]) > x

    assert_as_eager(function, torch.arange(1000), dynamic=True)


def test_a_kernel_for_known_sizes_says_nothing_of_this():
    (launch,) = plan_of(lambda x, y: x + y, made(100, 200), made(200)).launches
    assert "INDEX" not in kernel_source(launch.kernel, "kernel")
    assert launch_of(launch.kernel, "kernel").promises == ()


# --- what vectors need to know ----------------------------------------------------------------------------------------


def test_extents_that_are_products_are_promised_to_be_even():
    first, *_ = sources(lambda x: F.batch_norm(x, None, None, training=True), made(64, 256, 56, 56, dtype=BF16))
    assert "even = tl.multiple_of(even, 16)" in first
    assert first.count("s1 * s1") == 1, "the promised number is used everywhere"


@pytest.mark.parametrize("side", [57, 30])
def test_products_that_were_no_multiples_are_not(side):
    first, *_ = sources(lambda x: F.batch_norm(x, None, None, training=True), made(64, 256, side, side, dtype=BF16))
    assert "multiple_of" not in first


def test_rows_may_begin_at_multiples_of_less():
    """Eight elements of 16 bits are a vector."""
    (launch,) = plan_of(lambda x: x.softmax(-1), made(4096, 1000, dtype=BF16), dynamic=True).launches
    assert "s1 = tl.multiple_of(s1, 8)" in kernel_source(launch.kernel, "kernel")
    config = launch_of(launch.kernel, "kernel")
    assert [config.constants([64, columns])["EVEN_0"] for columns in (1000, 1024, 24, 1004, 1001)] == [1, 1, 1, 0, 0]
    (other,) = sources(lambda x: x.softmax(-1), made(4096, 1001, dtype=BF16))
    assert "multiple_of" not in other


# --- reductions in pieces ---------------------------------------------------------------------------------------------


def test_pieces_end_where_rows_do():
    """Nothing asks of every element whether it is one."""
    first, _ = sources(lambda x: x.sum(0), made(32768, 1024, dtype=BF16))
    (loop,) = re.findall(r"for i2_start in range\(0, (.*), 64\):", first)
    assert loop.startswith("tl.minimum(")
    assert "tl.where(" not in first, "beyond the end zeros are loaded"


@pytest.mark.parametrize("rows", [1000, 65, 7, 2])
@pytest.mark.parametrize("name", ["sum", "amax", "prod", "any"])
def test_pieces_that_end_early_or_are_empty(name, rows):
    functions = {
        "sum": lambda x: x.sum(0),
        "amax": lambda x: x.amax(0),
        "prod": lambda x: (1 + x / 100).prod(0),
        "any": lambda x: (x > 2).any(0),
    }
    assert_as_eager(functions[name], torch.randn(rows, 6), machine=TINY, dynamic=True, rtol=1e-4, atol=1e-4)


def test_what_is_masked_with_another_value_is_still_asked():
    """A greatest value that is zero at least beyond the first rows."""

    def function(x, n):
        inside = torch.arange(x.shape[0])[:, None] < n
        return torch.where(inside, x, 0.0).amax(0)

    assert_as_eager(function, -torch.rand(100, 5), torch.tensor(7), machine=TINY, dynamic=True)


def test_sums_of_columns_of_one_tensor_are_one_kernel():
    both = lambda x: ((x.float() * x.float()).sum(0), x.float().sum(0))  # noqa: E731
    first, *_ = sources(both, made(32768, 1024, dtype=BF16))
    assert first.count("tl.load(") == 1
    assert first.count("tl.store(") == 2
    assert_as_eager(both, torch.randn(100, 6).bfloat16(), machine=TINY, dynamic=True)


# --- counts -----------------------------------------------------------------------------------------------------------


def test_a_count_that_is_not_known_divides_in_32_bits():
    """Doubles are slow, and a variance divides at every element that reads it."""
    function = lambda x: (x - x.mean(-1, keepdim=True)) / x.var(-1, keepdim=True)  # noqa: E731
    (source,) = sources(function, made(4096, 1000))
    assert not re.search(r"tl.cast\(a\d+, tl.float64\)", source), "but the count itself"
    assert_as_eager(function, torch.randn(9, 21), machine=TINY, dynamic=True)


# --- rows and columns of one tensor -----------------------------------------------------------------------------------


def norm_gradients(x, w, g):
    return torch.ops.aten.native_layer_norm_backward(
        g, x, x.shape[-1:], x.mean(-1, keepdim=True), x.std(-1, keepdim=True), w, w, [True, True, True]
    )


def softmax_gradient(x, w, g):
    dx = torch.ops.aten._softmax_backward_data(g, x.softmax(-1), -1, x.dtype)
    return dx, dx.amax(0), (dx * w).sum(0)


W = torch.randn(24)


def known_columns(function, rows, monkeypatch):
    """The plan of a function for any number of rows, what it gives for some, and what eager gives."""
    caught = []

    def lower(*about):
        caught.append(lower_graph(*about))
        return caught[-1]

    monkeypatch.setattr("ferrite.backend.lower_graph", lower)
    x, g = torch.randn(800, 24), torch.randn(800, 24)
    for each in (x, g):
        torch._dynamo.mark_dynamic(each, 0)
    torch.compile(function, backend="ferrite", options={"strict": True}, fullgraph=True)(x, W, g)
    (made,) = caught
    plan = make_plan(made.program, {"cpu": scheduling(FEW_PROGRAMS)}, verify=True)
    x, g = torch.randn(rows, 24), torch.randn(rows, 24)
    return plan, run_plan(plan, [rows, x, g, W], made.objects), function(x, W, g)


@pytest.mark.parametrize("function", [norm_gradients, softmax_gradient])
@pytest.mark.parametrize("rows", [97, 17, 3])
def test_rows_and_columns_of_a_tensor_are_one_kernel(function, rows, monkeypatch, fresh_compiler):
    """Pieces of rows need not be equal, and some have none. The number of columns is known."""
    plan, found, wanted = known_columns(function, rows, monkeypatch)
    torch.testing.assert_close(found, list(wanted), rtol=1e-4, atol=1e-4)
    assert len(plan.launches) == 2, "the last adds pieces up"
    first = kernel_source(plan.launches[0].kernel, "kernel")
    assert "for i1_1 in tl.range(0, tl.minimum(" in first
    assert first.count("tl.store(") == 3


def test_columns_of_a_small_tensor_are_another_kernel():
    """The cache has its rows still."""
    first, *_, last = sources(norm_gradients, made(4096, 1024), made(1024), made(4096, 1024))
    assert "tl.range(" not in first
    assert last.count("tl.store(") == 2
