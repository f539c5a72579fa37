"""Batch normalisation as loop programs, with its gradients and statistics."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ferrite.ir.program.interpret import interpret
from ferrite.ir.program.laws import verify_program
from ferrite.ir.program.loop_operations import Reduce
from ferrite.lower.graph import lower_module
from tests.lower.lowered import assert_interpreted_as_eager, eager_calls, operations, programs, traced

pytestmark = pytest.mark.quick
aten = torch.ops.aten


NORMS = {
    "plain": lambda a, w, b: F.batch_norm(a, None, None, w, b, training=True),
    "without weights": lambda a, w, b: F.batch_norm(a, None, None, training=True) + w.sum() + b.sum(),
    "instances": lambda a, w, b: F.instance_norm(a, weight=w, bias=b),
    "running": lambda a, w, b: F.batch_norm(a, w.detach(), b.detach().abs(), w, b, training=False),
}


def weighted_batch(*sizes, dtype=torch.float32):
    values = [torch.randn(*sizes), torch.randn(sizes[1]), torch.randn(sizes[1])]
    return lambda: [each.to(dtype).requires_grad_() for each in values]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in NORMS), ("plain", torch.bfloat16)], ids=str
)
@pytest.mark.lengthy
def test_normalised_batches_and_their_gradients(name, dtype):
    assert (
        not assert_interpreted_as_eager(NORMS[name], weighted_batch(4, 3, 5, dtype=dtype), backward=True)
        .graphs[0]
        .eager_calls
    )


def test_a_batch_norm_with_its_running_statistics():
    module = torch.nn.BatchNorm2d(3, momentum=0.3)
    assert_interpreted_as_eager(module, lambda: [torch.randn(4, 3, 2, 5, requires_grad=True)], backward=True, calls=2)


def test_statistics_of_a_batch_are_kept_in_double_precision():
    assert_interpreted_as_eager(NORMS["plain"], weighted_batch(4, 3, 5), backward=True)
    forward, backward = programs()
    for program in (forward, backward):
        written = [each.buffer for loop in operations(program, Reduce) for each in loop.destinations if each]
        assert {buffer.dtype for buffer in program.buffers if buffer.name in written} == {torch.float64}


def test_two_numbers_far_from_zero_are_normalised():
    assert_interpreted_as_eager(lambda a: F.batch_norm(a, None, None, training=True), lambda: [1e4 + torch.rand(2, 64)])


def test_running_statistics_are_written_in_place():
    def fn(a, mean, variance):
        aten._native_batch_norm_legit.default(a, None, None, mean, variance, True, 0.3, 1e-5)
        return aten._native_batch_norm_legit.default(a, None, None, mean, variance, False, 0.3, 1e-5)[0]

    lowered = lower_module(traced(fn, *(given := [torch.randn(4, 3, 5), torch.zeros(3), torch.ones(3)])))
    ours, theirs = [each.clone() for each in given], [each.clone() for each in given]
    (made,) = interpret(verify_program(lowered.program), list(ours), lowered.objects)
    torch.testing.assert_close([made, *ours], [fn(*theirs), *theirs])
    assert not eager_calls(lowered.program)
