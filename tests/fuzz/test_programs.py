"""Random programs through the front door, compared with eager in everything a caller can see.

`python -m bench.random_programs` runs many of them; here are a few, and tests of what makes, judges and shrinks them.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench import random_programs
from bench.programs.generate import PROGRAMS, generate
from bench.programs.judge import NUDGES, TORCHS_OWN, difference, judge, near, nudged, observe, own_error
from bench.programs.program import Input, Program, Step
from bench.programs.shrink import smaller
from tests.compare import assert_same_as_eager

A_FEW, MANY = 3, 300


@pytest.mark.parametrize("kind", PROGRAMS)
def test_random_programs_are_eager(kind: str) -> None:
    for seed in range(A_FEW):
        assert_fine(generate(kind, seed))


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROGRAMS)
def test_many_random_programs_are_eager(kind: str) -> None:
    for seed in range(1000, 1000 + MANY):
        assert_fine(generate(kind, seed))


def assert_fine(program: Program) -> None:
    verdict = judge(program)
    assert verdict.fault in ("", "torch"), f"{verdict.detail}\n\n{program.source()}"


# --- what it stands on ------------------------------------------------------------------------------------------------

INPUT = Input("x0", (4, 6), "float32")
DOUBLED = Step("v0", "{v[0]} * {n[0]}", ("x0",), (2,))
PART = Step("v1", "{v[0]}[{n[0]}:]", ("v0",), (1,))
WRITTEN = Step("", "{v[0]}.mul_({n[0]})", ("v1",), (3,))
ELSEWHERE = Step("v2", "{v[0]}.to({n[0]!r})", ("v0",), ("meta",))
SMALL = Program((INPUT,), (DOUBLED, PART, WRITTEN), ("v0", "v1"))


def test_a_number_gives_one_program() -> None:
    for kind in PROGRAMS:
        assert generate(kind, 7) == generate(kind, 7) != generate(kind, 8)


def test_a_program_prints_as_lines_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    exec(SMALL.source(backend="eager"), {})
    eager, compiled = capsys.readouterr().out.split("[(", 2)[1:]
    assert eager == compiled
    assert SMALL.definition().splitlines()[1:] == [
        "    v0 = x0 * 2",
        "    v1 = v0[1:]",
        "    v1.mul_(3)",
        "    return v0, v1",
    ]


def test_a_program_survives_as_data() -> None:
    for kind in PROGRAMS:
        program = generate(kind, 3)
        assert Program.from_json(program.as_json()) == program


def test_numbers_on_another_device_are_those_of_the_cpu() -> None:
    """A program was made of lines that the CPU runs: an index of other numbers may point outside."""
    for kind in PROGRAMS:
        program = generate(kind, 66)
        (here, _), (there, _) = (inputs_of(dataclasses.replace(program, device=name)) for name in ("cpu", "cpu:0"))
        assert all(map(torch.equal, here, there))
        (elsewhere, _) = inputs_of(dataclasses.replace(program, device="meta"))
        assert {each.device.type for each in elsewhere} == {"meta"}


def inputs_of(program: Program) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    scope: dict = {"torch": torch}
    exec(program.maker(), scope)
    leaves, arguments = scope["inputs"](**{name: program.calls[0][name] for name in program.sizes})
    return leaves, arguments


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"steps": (DOUBLED, PART, dataclasses.replace(WRITTEN, numbers=(3.01,)))}, "output 0: off by"),
        ({"steps": (DOUBLED, dataclasses.replace(PART, template="{v[0]}[{n[0]}:].clone()"), WRITTEN)}, "sharing"),
        ({"inputs": (dataclasses.replace(INPUT, shape=(6, 4), layout="{}.t()"),)}, "strides"),
        ({"inputs": (dataclasses.replace(INPUT, dtype="float64"),)}, "dtype"),
        ({"results": ("v0", "x0")}, "shape"),
        ({"steps": (DOUBLED, PART, WRITTEN, ELSEWHERE), "results": ("v2", "v1")}, "device meta instead of cpu"),
        ({"steps": (DOUBLED, PART, dataclasses.replace(WRITTEN, template="{v[0]}.unknown({n[0]})"))}, "AttributeError"),
    ],
    ids=["values", "sharing", "strides", "dtype", "shape", "device", "error"],
)
def test_what_differs_is_seen(change: dict, problem: str) -> None:
    eager, wide = observe(SMALL, "eager"), observe(SMALL, "float64")
    other = dataclasses.replace(SMALL, **change)
    found = difference(SMALL, observe(other, "eager"), eager, wide)
    assert found is not None
    assert problem in found
    assert difference(SMALL, observe(SMALL, "eager"), eager, wide) is None


@pytest.mark.parametrize(
    ("theirs", "fault"),
    [
        ({"aot_eager": "strides"}, "torch"),
        ({"aot_eager": "values"}, "wrong"),
        ({"aot_eager": "strides, values"}, "torch"),  # elsewhere it is wrong where we are right
        ({"aot_eager": "", "as Dynamo traced it": ""}, "wrong"),
    ],
)
def test_what_is_torchs_own_is_found_fact_by_fact(monkeypatch, theirs: dict[str, str], fault: str) -> None:
    """Strides of one result are wrong with us, and maybe with torch's own backends, which may be wrong elsewhere."""
    layout = Step("v2", "{v[0]} + {n[0]}", ("x0",), (1,))
    program = dataclasses.replace(SMALL, steps=(*SMALL.steps, layout), results=("v0", "v2"))
    changes = {
        "strides": {"v2": "({v[0]} + {n[0]}).t().contiguous().t()"},
        "values": {"v0": "{v[0]} * {n[0]} * 1.5"},
    }

    def with_faults(names: str) -> Program:
        templates = {k: v for name in names.split(", ") if name for k, v in changes[name].items()}
        steps = (
            dataclasses.replace(each, template=templates.get(each.target, each.template)) for each in program.steps
        )
        return dataclasses.replace(program, steps=tuple(steps))

    def observed(asked: Program, how: str):
        if how == "ferrite":
            return observe(with_faults("strides"), "eager")
        return observe(with_faults(theirs.get(how, "")), "eager") if how in TORCHS_OWN else observe(asked, how)

    monkeypatch.setattr("bench.programs.judge.observe", observed)
    assert judge(program).fault == fault


def test_rounding_on_the_way_is_no_difference() -> None:
    """Numbers that cancel leave nothing but rounding, in which ours may be far from eager's."""
    steps = (
        Step("v0", "{v[0]} * {n[0]}", ("x0",), (1.1,)),
        Step("v1", "{v[1]} * {n[0]} - {v[0]}", ("v0", "x0"), (1.1,)),
        Step("v2", "{v[0]} > 0", ("v1",)),
    )
    program = Program((INPUT,), steps, ("v1", "v2"))
    eager, wide = observe(program, "eager"), observe(program, "float64")
    other = dataclasses.replace(program, steps=(steps[0], Step("v1", "{v[0]} * 1e-8", ("x0",)), steps[2]))
    assert difference(program, observe(other, "eager"), eager, wide) is None
    larger = dataclasses.replace(program, steps=(steps[0], Step("v1", "{v[0]} * 1e-3", ("x0",)), steps[2]))
    assert difference(program, observe(larger, "eager"), eager, wide) is not None


def test_a_program_is_made_smaller() -> None:
    program = generate("dynamic", 5)
    extra = Step("w", "{v[0]}.sum()", (program.inputs[0].name,))
    program = dataclasses.replace(program, steps=(*program.steps, extra), results=(*program.results, "w"))
    found = smaller(program, lambda each: any(".sum()" in step.text() for step in each.steps))
    assert [step.text() for step in found.steps] == ["x0.sum()"]
    assert (len(found.inputs), len(found.calls), found.dynamic) == (1, 1, False)
    assert judge(found).fault == ""


@pytest.mark.slow  # two processes that import torch
def test_a_process_that_goes_down_is_told_from_one_that_judges() -> None:
    gone = dataclasses.replace(SMALL, steps=(*SMALL.steps, Step("", "__import__('os')._exit(1)")))
    assert random_programs.crashes(gone, threads=1)
    assert not random_programs.crashes(dataclasses.replace(SMALL, steps=(DOUBLED, PART)), threads=1)


def test_ranges_of_seeds_join() -> None:
    assert random_programs.ranges([[5, 6], [0, 1], [1, 2], [2, 5]]) == [[0, 6]]
    assert random_programs.ranges([[0, 40], [80, 120]]) == [[0, 40], [80, 120]]


# --- what random programs have found ----------------------------------------------------------------------------------


FOUND = {
    "a view of a result that is the input itself": (
        lambda x: (x.flatten(1).squeeze(0), x.to(torch.float32).squeeze(0), x.flatten(1)),
        lambda: [torch.randn(2, 3)],
    ),
    "a softmax of whole numbers, of which there are none": (
        lambda x: (x.softmax(0), x.log_softmax(0)),
        lambda: [torch.ones(0, dtype=torch.int64)],
    ),
    "a scatter to nothing, beside what it starts from": (
        lambda x: (y := x + 1, y.scatter_add(0, x, y), y.index_add(0, x, y)),
        lambda: [torch.ones(0, dtype=torch.int64)],
    ),
    "a product of nothing": (lambda x: x.prod(0, keepdim=True), lambda: [torch.randn(1, 0)]),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name: str) -> None:
    assert_same_as_eager(*FOUND[name])


def test_how_far_eager_may_be_off_in_float64() -> None:
    """Digits that an operator loses inside of itself are eager's to lose, too; anything that is more is a fault."""
    x = torch.tensor([-8.0], dtype=torch.float64)
    theirs = torch.nn.functional.gelu(x)
    own = own_error(theirs, torch.nn.functional.gelu(x.float()))
    runs = [nudged(theirs, [x]) for _ in range(NUDGES)]
    for away, fine in ((4e-17, True), (5e-15, True), (1e-12, False), (1e-9, False)):
        assert near(theirs + away, theirs, runs, theirs, own) is fine
    assert own_error(theirs.float(), theirs.float()) == 0


def test_a_large_number_elsewhere_excuses_nothing() -> None:
    """What a line reads and makes is all that it can have rounded."""
    inputs = (Input("x0", (4,), "float64"),)
    steps = (Step("v0", "{v[0]} * {n[0]}", ("x0",), (1e12,)), Step("v1", "{v[0]} * {n[0]}", ("x0",), (1.5,)))
    program = Program(inputs, steps, ("v0", "v1"))
    wrong = dataclasses.replace(program, steps=(steps[0], Step("v1", "{v[0]} * {n[0]} + 1e-9", ("x0",), (1.5,))))
    eager, wide = observe(program, "eager"), observe(program, "float64")
    assert "output 1" in str(difference(program, observe(wrong, "eager"), eager, wide))
    assert difference(program, observe(program, "eager"), eager, wide) is None


def normalised(after: str, shift: float) -> tuple[Program, Program]:
    """A program that asks of normalised numbers which are above zero, and one that has them off by a little."""
    norm = Step("v0", "torch.nn.functional.layer_norm({v[0]}, (13,))", ("x0",))
    moved = dataclasses.replace(norm, template=f"{norm.template} + {shift!r}")
    inputs = (Input("x0", (9, 13), "bfloat16", values="eighths"),)
    one, other = (
        Program(inputs, (step, Step("v1", after, ("v0",))), ("v1",), from_data=True) for step in (norm, moved)
    )
    return one, other


@pytest.mark.parametrize("after", ["{v[0]} > 0", "({v[0]} > 0).sum().item()", "torch.remainder({v[0]}, {v[0]})"])
def test_what_rounding_alone_decides_is_no_difference(after: str) -> None:
    """Some numbers are the mean of their row, of which eager has rounding alone: -1.5e-8, and float64 5e-17. What is
    0 there, or a little more, is as right; what moves numbers that have a digit is not."""
    for shift, is_fine in ((-3e-8, True), (3e-8, True), (1.0, False)):
        program, other = normalised(after, shift)
        eager, wide = observe(program, "eager"), observe(program, "float64")
        found = difference(program, observe(other, "eager"), eager, wide)
        assert (found is None) is is_fine, found


def test_what_is_exactly_zero_decides() -> None:
    """Near miss: eager and float64 agree on zeros that no rounding made."""
    program = dataclasses.replace(
        SMALL, steps=(Step("v0", "{v[0]}.relu()", ("x0",)), Step("v1", "{v[0]} > 0", ("v0",)))
    )
    other = dataclasses.replace(program, steps=(Step("v0", "{v[0]}.relu() + 1e-30", ("x0",)), program.steps[1]))
    eager, wide = observe(program, "eager"), observe(program, "float64")
    assert difference(program, observe(other, "eager"), eager, wide) is not None


def test_what_is_zero_stays_zero_when_nudged() -> None:
    value = torch.tensor([0.0, 1e-3], dtype=torch.float64)
    found = nudged(value, [torch.tensor([1e6], dtype=torch.float64)])
    assert found[0] == 0
    assert 0 < (found[1] - value[1]).abs() < 1e-8
