"""Launches that are alike and independent are one, on a GPU: which are, in which order they come then, and what they
compute, in Triton's interpreter and in that of kernels."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from ferrite.ir.invalid import InvalidProgram
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.pipeline import Fuel
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.gpu.grouping import Grouping, dependencies, in_order
from ferrite.schedule.laws import check_problems
from ferrite.schedule.plan import make_plan
from ferrite.schedule.steps import Launch, Run
from tests.gpu_plans import MACHINE, TINY, assert_as_eager, lowered, plan_of, scheduling

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
SIZES = (40, 8, 15, 17, 64, 33)
FEW = MACHINE.min_grouped_launches - 1


def momentum(*tensors):
    """One step for each pair of a parameter and a gradient."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return [parameter * 0.9 - gradient * 0.1 for parameter, gradient in pairs]


def in_place(*tensors):
    for parameter, gradient in zip(tensors[::2], tensors[1::2], strict=True):
        parameter.mul_(0.9).sub_(gradient, alpha=0.1)
    return list(tensors[::2])


def pairs(*sizes, dtype=torch.float32):
    return [torch.randn(size).to(dtype) for size in sizes for _ in range(2)]


def problems(plan):
    """For each launch how many problems it has; 0 where it is no group."""
    return [len(launch.kernel.problems) for launch in plan.launches]


@pytest.mark.parametrize("triton", [True, False], ids=["triton", "kernels"])
@pytest.mark.parametrize("function", [momentum, in_place])
def test_a_step_over_many_tensors_is_one_launch(function, triton):
    plan = assert_as_eager(function, *pairs(*SIZES), machine=TINY, triton=triton)
    assert problems(plan) == [len(SIZES)]
    (launch,) = plan.launches
    assert launch.kernel.problems == tuple((size,) for size in SIZES)
    assert len(launch.arguments) == len(launch.kernel.arguments) == len(SIZES) * len(launch.kernel.pointers)
    assert parse_kernel(str(launch.kernel)) == launch.kernel


def test_numbers_that_decide_about_many_elements_are_made_in_groups_of_their_own():
    """As in Adam with steps on the GPU: before the large kernels, and after them."""

    def step(*tensors):
        counts, parameters = tensors[: len(SIZES)], tensors[len(SIZES) :]
        new = [parameter / (1 - torch.pow(0.9, count + 1)) for count, parameter in zip(counts, parameters, strict=True)]
        return [*new, *(count + 1 for count in counts)]

    given = [torch.tensor(float(place)) for place in range(len(SIZES))] + [torch.randn(size) for size in SIZES]
    plan = assert_as_eager(step, *given, machine=replace(MACHINE, one_program_elements=1))
    assert set(problems(plan)) == {len(SIZES)}
    assert len(plan.launches) <= 3


def test_reductions_that_are_equal_are_one():
    given = [torch.randn(4, 9) for _ in range(4)]
    plan = assert_as_eager(lambda *given: [x.sin().sum(-1) for x in given], *given)
    assert problems(plan) == [4]
    assert plan.launches[0].kernel.problems == ((),) * 4
    few = [*given[:FEW], torch.randn(4, 10)]
    assert set(problems(plan_of(lambda *given: [x.sum(-1) for x in given], *few))) == {0}


def test_lengths_that_are_no_multiples_of_a_vector_stay_apart_where_there_are_enough_others():
    few, many = (plan_of(momentum, *pairs(15, 17, *even)) for even in ((64, 32), (64, 32, 96, 16)))
    assert problems(few) == [4]
    assert sorted(problems(many)) == [0, 0, 4]


def test_types_and_forms_are_groups_of_their_own():
    def both(*tensors):
        return [*momentum(*tensors[:10]), *(x.sin() for x in tensors[10:])]

    others = [torch.randn(size, dtype=torch.float64) for size in range(20, 26)]  # no rows as those of the first
    plan = plan_of(both, *pairs(*SIZES[:5]), *others)
    assert sorted(problems(plan)) == [5, 6]
    halves = plan_of(momentum, *pairs(*SIZES[:4]), *pairs(20, 21, 22, 23, dtype=torch.bfloat16))
    assert problems(halves) == [4, 4]


def test_few_are_launched_one_by_one():
    assert problems(plan_of(momentum, *pairs(*SIZES[:FEW]))) == [0] * FEW


def test_tensors_without_elements():
    plan = assert_as_eager(momentum, *pairs(40, 0, 8, 15, 17), machine=TINY)
    assert problems(plan) == [5]


def test_sizes_that_are_not_known_are_no_problems():
    assert set(problems(plan_of(momentum, *pairs(*SIZES), dynamic=True))) == {0}


def test_what_would_hold_much_at_once_is_not_grouped():
    def function(*tensors):
        flipped = [x.exp().cumsum(0) for x in tensors]  # what scans make is in memory
        return [(x * 2).sum() for x in flipped]

    given = [torch.randn(size) for size in SIZES]
    assert max(problems(plan_of(function, *given, machine=replace(TINY, max_bytes_between=100)))) == 0


def test_fuel_is_spent_on_groups():
    program = lowered(momentum, *pairs(*SIZES)).program
    fuel = Fuel(1000)
    make_plan(program, {"cpu": scheduling()}, fuel=fuel)
    used = 1000 - fuel.amount
    plan = make_plan(program, {"cpu": scheduling()}, fuel=Fuel(used - 1))
    assert set(problems(plan)) == {0}
    assert len(plan.launches) == len(SIZES)


# --- order ------------------------------------------------------------------------------------------------------------

ADD = """
def kernel(p0, p1):
    p0 = pointer(f32, 'write')
    p1 = pointer(f32, 'read')
    warps = 1
    for i0 in vector(16, lanes=16):
        v0: f32 = p1[i0]
        p0[i0] = v0
"""


LETTERS = "abcdefghijkl"


def launches(*arguments):
    return [Launch(parse_kernel(ADD), tuple(names.split()), (), ()) for names in arguments]


def grouped(*arguments):
    """What becomes of launches on inputs of a program, called by letters."""
    program = lowered(lambda *given: [x + 1 for x in given], *(torch.randn(16) for _ in LETTERS)).program
    buffers = [buffer.name for buffer in program.buffers if buffer.kind == "input"]
    letters = dict(zip(buffers, LETTERS, strict=True))
    names = {letter: name for name, letter in letters.items()}
    given = [" ".join(map(names.__getitem__, each.split())) for each in arguments]
    run = Grouping(BufferTable(program), MACHINE).grouped(Run(tuple(launches(*given))))
    for launch in run.launches:
        check_problems(launch)
    return ["".join(map(letters.__getitem__, launch.arguments)) for launch in run.launches]


def test_independent_launches_are_one_at_the_place_of_the_first():
    assert grouped("a b", "c d", "e f", "g h") == ["abcdefgh"]
    assert grouped("a i", "b i", "c i", "d i") == ["aibicidi"]  # all may read one


@pytest.mark.parametrize(
    "chain",
    [
        ("b a", "c b", "d c", "e d"),  # each reads what the one before has written
        ("a b", "b c", "c d", "d e"),  # each writes what the one before has read
        ("a b", "a c", "a d", "a e"),  # all write one
    ],
)
def test_launches_that_wait_for_each_other_are_not_one(chain):
    assert grouped(*chain) == [each.replace(" ", "") for each in chain]


def test_what_a_group_needs_comes_before_it_and_what_needs_it_after():
    found = grouped("b a", "i b", "d c", "j d", "f e", "k f", "h g", "l h", "a l")
    assert found == ["badcfehg", "ibjdkflh", "al"]
    needs, levels = dependencies(launches("b a", "c b", "e d", "f e", "h g", "i h", "g i", "j i"))
    assert levels == [1, 2, 1, 2, 1, 2, 3, 3]
    assert needs[6] == {4, 5}
    one = [0, 2, 4]
    nodes = [one, [1], one, [3], one, [5], [6], [7]]
    assert in_order(nodes, needs) == [one, [1], [3], [5], [6], [7]]
    late = [1, 3, 5]
    nodes = [[0], late, [2], late, [4], late, [6], [7]]
    assert in_order(nodes, needs) == [[0], [2], [4], late, [6], [7]]


def test_a_group_of_launches_that_meet_in_memory_breaks_a_law():
    (launch,) = launches("a b")
    group = replace(launch, kernel=replace(launch.kernel, problems=((), ())), arguments=("a", "b", "c", "b"))
    check_problems(group)
    with pytest.raises(InvalidProgram, match="S6"):
        check_problems(replace(group, arguments=("a", "b", "c", "a")))
