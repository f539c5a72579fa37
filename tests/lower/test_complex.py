"""Complex numbers: arithmetic, parts, conjugates, and views between pairs of floats and complex numbers."""

from __future__ import annotations

import pytest
import torch

from ferrite.lower.graph import lower_module
from tests.compare import assert_same_as_eager, compile_strict
from tests.lower.lowered import assert_lowered, calls, run, traced

pytestmark = pytest.mark.quick


def numbers(dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return torch.randn(6, dtype=torch.complex64).to(dtype)


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: (a * b + 2j) / (b - 0.5),
        lambda a, b: (a.exp(), b.sqrt(), a.sin(), b.tanh(), a.sigmoid(), b.log()),
        lambda a, b: (a**2, a**-1, a**0.5, a**b),
        lambda a, b: (a == b, a != a.clone()),
        lambda a, b: (a.abs(), b.angle(), a.sgn(), torch.polar(a.abs(), b.angle())),
        lambda a, b: (a.real * 2 + b.imag, torch.complex(a.imag, b.real)),
        lambda a, b: a.conj() * b.conj() + a.conj().imag,
        lambda a, b: torch.view_as_real(a + b) * 2,
        lambda a, b: torch.view_as_complex(torch.view_as_real(a) + 1) * b,
        lambda a, b: torch.where(a.real > 0, a, b),
        lambda a, b: torch.lerp(a, b, 0.25),
        lambda a, b: torch.nan_to_num(a / 0),
        lambda a, b: a + b.real,
        lambda a, b: (a.isnan(), b.isinf(), a.isfinite()),
    ],
)
def test_complex_arithmetic_is_a_loop(fn):
    assert not calls(assert_lowered(fn, numbers(), numbers()))


def test_parts_of_real_numbers():
    x = torch.tensor([1.0, -2.0, 0.0, -0.0, float("nan"), float("-inf")])
    assert not calls(assert_lowered(lambda x: (x.angle(), x.to(torch.complex64), x.sgn()), x))
    assert not calls(assert_lowered(lambda x: x.angle(), torch.tensor([3, -3, 0])))


def test_a_view_of_memory_is_a_view_buffer():
    program = lower_module(traced(lambda a: torch.view_as_real(a), numbers())).program
    assert program.operations == ()
    assert [buffer.kind for buffer in program.buffers] == ["input", "view"]
    assert_lowered(lambda a: torch.view_as_real(a[1:]), numbers())
    assert_lowered(lambda a: torch.view_as_complex(a.view(3, 2, 2)[1:]), torch.randn(12))


def test_what_is_written_through_a_view_is_written():
    def fn(a):
        torch.view_as_real(a).add_(1)
        return a * 2

    run(fn, lambda: [numbers()])


def test_gradients_of_complex_numbers():
    fn = lambda a, b: (a * b.conj()).abs().sum()  # noqa: E731
    program = run(fn, lambda: [numbers().requires_grad_(), numbers().requires_grad_()], backward=True)
    # what was kept is conjugated when it is read, and so is one gradient, as eager's is
    assert [call.operator for call in calls(program)] == ["aten.clone.default", "aten._conj.default"]


def test_floats_seen_as_complex_numbers():
    run(lambda a: (a + 1).view(torch.complex64) * 2, lambda: [torch.randn(8)], exact=False)
    assert not calls(run(lambda a: a.to(torch.complex64) + 1j, lambda: [torch.randn(4, 4)]))


def test_a_conjugate_that_comes_in_is_read_as_what_it_is():
    run(lambda a: a * 2 + a.real, lambda: [numbers()], prepare=lambda a: [a.conj()], exact=False)
    run(lambda a: (a, a + 1), lambda: [numbers()], prepare=lambda a: [a.conj()], exact=False)
    run(lambda a: a.mul_(2), lambda: [numbers()], prepare=lambda a: [a.conj()], exact=False)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64])
@pytest.mark.parametrize("fn", [lambda x: (x.conj(), x.real + 1), lambda x: (x.conj().imag, x.imag * 2)])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_conjugate_that_is_returned_has_its_bit(fn, dtype):
    x = torch.complex(torch.randn(2, 3), torch.randn(2, 3)).to(dtype)
    for ours, eager in zip(compile_strict(fn)(x), fn(x), strict=True):
        assert (ours.is_conj(), ours.is_neg(), ours.stride()) == (eager.is_conj(), eager.is_neg(), eager.stride())
        assert ours.dtype == eager.dtype
        assert torch.equal(ours.to(torch.complex64), eager.to(torch.complex64))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        lambda a: (a * 2).expand(5, 4).conj().t(),
        lambda a: (a * 2).unsqueeze(1).expand(5, 3, 1).conj(),
        lambda a: torch._neg_view((a.real * 2).expand(5, 4)),
    ],
)
@pytest.mark.lengthy
def test_one_number_at_many_places_is_conjugated_once(fn, dynamic):
    """Eager's result is a view, a stride of 0 included; memory of our own has the number once too."""
    assert_same_as_eager(fn, lambda: [numbers()[:5, None]], dynamic=dynamic)


def test_gradients_of_a_product_with_an_operand_of_stride_0():
    def make():
        return [numbers()[:5, None].expand(5, 5).detach().requires_grad_(), torch.randn(5, 5, dtype=torch.complex64)]

    assert_same_as_eager(lambda a, b: a @ b, make, backward=True)
