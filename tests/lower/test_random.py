"""Random numbers: eager's streams where eager draws, and a counter's numbers as expressions, bit for bit."""

from __future__ import annotations

import pytest
import torch

from ferrite.ir.program.interpret import interpret
from ferrite.ir.program.laws import verify_program
from ferrite.ir.program.loop_operations import Compute
from ferrite.ir.program.nodes import Seeds
from ferrite.lower.graph import lower_module
from ferrite.lower.table import DRAWN
from ferrite.passes.joint import counter_rng as counter_rng  # defines torch.ops.ferrite
from tests.compare import compile_strict, reset
from tests.lower.lowered import INTERPRETER, assert_lowered, calls, programs, run, traced

pytestmark = pytest.mark.quick
aten, ours = torch.ops.aten, torch.ops.ferrite

KEY = torch.tensor([0x12345678, 0xFEDCBA98])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["uniform", "normal", "exponential"])
def test_counted_numbers_are_those_of_the_operator(kind, dtype):
    fn = lambda key: ours.random(key, 5, [3, 7], kind, dtype)  # noqa: E731
    program = assert_lowered(fn, KEY)
    assert [type(operation) for operation in program.operations] == [Compute]
    lowered = lower_module(traced(fn, KEY))
    (mine,) = interpret(lowered.program, [KEY], lowered.objects)
    assert torch.equal(mine, fn(KEY))


def test_counted_integers_are_those_of_the_operator():
    for dtype, low, high in ((torch.int64, -5, 2**62), (torch.int32, 0, 10), (torch.uint8, 3, 200)):
        fn = lambda key, dtype=dtype, low=low, high=high: ours.random(key, 0, [9], "integer", dtype, low, high)  # noqa: E731
        lowered = lower_module(traced(fn, KEY))
        assert not calls(lowered.program)
        (mine,) = interpret(lowered.program, [KEY], lowered.objects)
        assert torch.equal(mine, fn(KEY))


def test_places_of_two_operators_and_of_two_keys_differ():
    def fn(key):
        return [ours.random(key, index, [64], "uniform", torch.float32) for index in range(3)]

    lowered = lower_module(traced(fn, KEY))
    first, second, third = interpret(lowered.program, [KEY], lowered.objects)
    (other, *_) = interpret(lowered.program, [KEY + 1], lowered.objects)
    assert len({tuple(values.tolist()) for values in (first, second, third, other)}) == 4


def test_a_key_is_drawn_from_the_generator():
    def fn(x):
        key = ours.random_key(0, device=torch.device("cpu"))
        return x + ours.random(key, 0, [4], "uniform", torch.float32)

    lowered = lower_module(traced(fn, torch.zeros(4)))
    assert isinstance(lowered.program.operations[0], Seeds)
    torch.manual_seed(7)
    (mine,) = interpret(lowered.program, [torch.zeros(4)], lowered.objects)
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(mine, fn(torch.zeros(4)))
    assert torch.equal(after, torch.rand(1))


def test_a_key_that_nobody_reads_still_moves_the_generator():
    gm = traced(lambda x: (ours.random_key(0, device=torch.device("cpu")), x + 1)[1], torch.zeros(4))
    assert any(isinstance(operation, Seeds) for operation in lower_module(gm).program.operations)


def test_eager_draws_what_eager_draws():
    def fn(x):
        return torch.rand(3) + x, torch.bernoulli(x.sigmoid()), torch.randn_like(x), torch.randint(9, (2,))

    lowered = lower_module(traced(fn, torch.zeros(3)))
    assert [call.reason for call in calls(lowered.program)] == [DRAWN] * 4
    assert all(call.effect == "random" for call in calls(lowered.program))
    torch.manual_seed(3)
    mine = interpret(lowered.program, [torch.zeros(3)], lowered.objects)
    torch.manual_seed(3)
    assert all(torch.equal(one, other) for one, other in zip(mine, fn(torch.zeros(3)), strict=True))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", [(5, 4), (0,)], ids=str)
def test_dropout_draws_its_mask_and_computes_the_rest(p, shape):
    fn = lambda x: aten.native_dropout(x, p, True)  # noqa: E731
    x = torch.randn(shape).t()
    lowered = lower_module(traced(fn, x))
    verify_program(lowered.program)
    assert [call.operator for call in calls(lowered.program)] == ["aten.bernoulli_.float"]
    torch.manual_seed(11)
    mine = interpret(lowered.program, [x], lowered.objects)
    torch.manual_seed(11)
    theirs = fn(x)
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
    assert [one.stride() for one in mine] == [other.stride() for other in theirs]


def test_nothing_is_drawn_when_not_training():
    assert not calls(assert_lowered(lambda x: aten.native_dropout(x, 0.5, False), torch.randn(4)))


def test_numbers_drawn_in_place():
    fn = lambda a: torch.empty_like(a).bernoulli_(0.5) + a  # noqa: E731
    program = run(fn, lambda: [torch.randn(4)])
    assert [call.effect for call in calls(program)] == ["random"]


def test_two_random_operators_have_one_key():
    reset()
    compiled = compile_strict(lambda a: torch.rand(8) + a + torch.rand(8), options={**INTERPRETER, "rng": "counter"})
    x = torch.zeros(8)
    torch.manual_seed(1)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(1)
    assert torch.equal(first, compiled(x))
    assert not torch.equal(first, second)
    (program,) = programs()
    assert [type(operation) for operation in program.operations] == [Seeds, Compute]


def test_training_with_counted_numbers_is_repeatable_and_has_no_calls():
    def fn(x):
        return torch.nn.functional.dropout(x.sin(), 0.5).sum()

    reset()
    compiled = compile_strict(fn, options={**INTERPRETER, "rng": "counter"})
    found = []
    for _ in range(2):
        x = torch.ones(64, requires_grad=True)
        torch.manual_seed(5)
        compiled(x).backward()
        found.append(x.grad)
    assert torch.equal(*found)
    assert 0 < int((found[0] == 0).sum()) < 64
