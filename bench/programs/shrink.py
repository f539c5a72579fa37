"""A program with a fault, made smaller while it keeps the fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from bench.programs.program import Program, Step

TRIALS, SECONDS = 200, 90.0


def smaller(
    program: Program, keeps: Callable[[Program], bool], *, seconds: float = SECONDS, trials: int = TRIALS
) -> Program:
    """The smallest program found that `keeps` the fault, within some time."""
    end = time.monotonic() + seconds
    seen = {repr(program)}
    found = True
    while found:
        found = False
        for candidate in candidates(program):
            if repr(candidate) in seen or not whole(candidate):
                continue
            if time.monotonic() > end or trials <= 0:
                return program
            seen.add(repr(candidate))
            trials -= 1
            if keeps(candidate):
                program, found = candidate, True
                break
    return program


def whole(program: Program) -> bool:
    """Whether every name is defined before it is used, and something is returned."""
    known: set[str] = set()
    for each in program.inputs:
        if each.base and each.base not in known:
            return False
        known.add(each.name)
    for step in program.steps:
        if not set(step.operands) <= known:
            return False
        known |= set(step.targets)
    return bool(program.results) and set(program.results) <= known


def candidates(program: Program) -> Iterator[Program]:
    """Programs that are a little simpler, those that save most first."""
    if program.training:
        yield replace(program, training=False)
    if program.from_data:
        yield replace(program, from_data=False)
    for i in range(len(program.calls)):
        if len(program.calls) > 1:
            yield replace(program, calls=program.calls[:i] + program.calls[i + 1 :])
    if program.dynamic and len(program.calls) == 1:
        yield replace(program, dynamic=False)
    yield from with_fewer_results(program)
    yield from with_fewer_steps(program)
    yield from with_plainer_inputs(program)
    yield from with_smaller_sizes(program)
    yield from with_plainer_steps(program)


def with_fewer_results(program: Program) -> Iterator[Program]:
    if len(program.results) > 1:
        for i in range(len(program.results)):
            yield replace(program, results=program.results[:i] + program.results[i + 1 :])
    for step in program.steps:  # an earlier value instead of a later one
        for target in step.targets:
            if target in program.results:
                for operand in step.operands:
                    if operand not in program.results:
                        results = tuple(operand if name == target else name for name in program.results)
                        yield replace(program, results=results)


def with_fewer_steps(program: Program) -> Iterator[Program]:
    for i in reversed(range(len(program.steps))):
        step = program.steps[i]
        rest = program.steps[:i] + program.steps[i + 1 :]
        if not step.targets:
            yield replace(program, steps=rest)
            continue
        gone = set(step.targets)
        kept = []
        for other in rest:
            if gone & set(other.operands):
                gone |= set(other.targets)
            else:
                kept.append(other)
        results = tuple(name for name in program.results if name not in gone)
        yield replace(program, steps=tuple(kept), results=results)
        for operand in step.operands:
            new = dict.fromkeys(step.targets, operand)
            steps = tuple(replace(s, operands=tuple(new.get(name, name) for name in s.operands)) for s in rest)
            yield replace(program, steps=steps, results=tuple(dict.fromkeys(new.get(n, n) for n in program.results)))


def with_plainer_inputs(program: Program) -> Iterator[Program]:
    used = {name for step in program.steps for name in step.operands} | set(program.results)
    used |= {each.base for each in program.inputs}
    for i, each in enumerate(program.inputs):
        before, after = program.inputs[:i], program.inputs[i + 1 :]
        if each.name not in used and len(program.inputs) > 1:
            yield replace(program, inputs=before + after)
        for other in before:  # one input in place of two
            steps = tuple(
                replace(s, operands=tuple(other.name if n == each.name else n for n in s.operands))
                for s in program.steps
            )
            yield replace(program, steps=steps)
        changes = []
        if each.layout != "{}" and not each.base:
            changes.append({"layout": "{}"})
        if each.dtype != "float32" and not each.values.startswith("below"):
            changes.append({"dtype": "float32", "values": "normal"})
        if len(each.shape) > 1:
            changes += [{"shape": each.shape[:k] + each.shape[k + 1 :]} for k in range(len(each.shape))]
        for change in changes:
            yield replace(program, inputs=(*before, replace(each, **change), *after))


def with_smaller_sizes(program: Program) -> Iterator[Program]:
    for i, call in enumerate(program.calls):
        for name in program.sizes:
            for size in less(call[name]):
                calls = (*program.calls[:i], {**call, name: size}, *program.calls[i + 1 :])
                yield replace(program, calls=calls)
    for i, each in enumerate(program.inputs):
        for k, size in enumerate(each.shape):
            others = [program.calls[0][size]] if size in program.sizes else less(size) if isinstance(size, int) else []
            for other in others:
                shape = (*each.shape[:k], other, *each.shape[k + 1 :])
                inputs = (*program.inputs[:i], replace(each, shape=shape), *program.inputs[i + 1 :])
                yield replace(program, inputs=inputs)
    numbers = sorted({size for each in program.inputs for size in each.shape if isinstance(size, int)})
    for number in numbers:  # a size that several inputs have, in all of them
        for other in less(number):
            inputs = tuple(
                replace(x, shape=tuple(other if s == number else s for s in x.shape)) for x in program.inputs
            )
            yield replace(program, inputs=inputs)


def less(number: int) -> list[int]:
    return [n for n in dict.fromkeys((2, 3, 1, number // 2, number - 1)) if 0 < n < number]


def with_plainer_steps(program: Program) -> Iterator[Program]:
    for i, step in enumerate(program.steps):
        for plainer in plainer_steps(step):
            yield replace(program, steps=(*program.steps[:i], plainer, *program.steps[i + 1 :]))


def plainer_steps(step: Step) -> Iterator[Step]:
    if step.template == "{v[0]}.{n[0]}()" and step.numbers != ("neg",):
        yield replace(step, numbers=("neg",))
    sum_of_two = replace(step, template="torch.{n[0]}({v[0]}, {v[1]})", numbers=("add",))
    if step.targets and len(step.operands) == 2 and step != sum_of_two:
        yield sum_of_two
    for k, number in enumerate(step.numbers):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        for other in (0, 1, 2, number // 2 if isinstance(number, int) else 2):
            if abs(other) < abs(number):
                yield replace(step, numbers=(*step.numbers[:k], other, *step.numbers[k + 1 :]))
