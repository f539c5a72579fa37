"""The plan of a program: launches of kernels and other operations in order, and what each leaves behind."""

from __future__ import annotations

import itertools

from ferrite.ir.canonical import canonical
from ferrite.ir.kernel_laws import verify_kernel
from ferrite.ir.laws import verify_program
from ferrite.ir.program import Allocate, If, Invoke, Program, While
from ferrite.ir.questions import bodies_of
from ferrite.schedule.arena import Arenas
from ferrite.schedule.groups import Group
from ferrite.schedule.in_place import Takeovers, later, with_views
from ferrite.schedule.kernels import build
from ferrite.schedule.machine import Machine
from ferrite.schedule.memory import last_uses, private
from ferrite.schedule.order import Native, Order
from ferrite.schedule.prepare import prepare
from ferrite.schedule.repeats import Repeats
from ferrite.schedule.runs import with_parted_runs
from ferrite.schedule.steps import Launch, Plan, Run, Step
from ferrite.schedule.together import Regions
from ferrite.schedule.touches import Layouts


def make_plan(program: Program, machine: Machine, native: Native, verify: bool = False, fuse: bool = True) -> Plan:
    program = prepare(program)
    if verify:
        verify_program(program)
    ordered = Order(program, machine, native, fuse).run()
    layouts = Layouts(program)
    inside = private(program, ordered.items, layouts)
    takeovers = Takeovers(program, ordered.items, layouts)
    repeats = Repeats(layouts, machine)
    steps: list[Step] = []
    alone: dict[int, str] = {}
    bodies: dict[int, tuple[Plan, ...]] = {}
    waiting: list[Launch] = []

    def flush() -> None:
        if waiting:
            steps.append(Run(tuple(waiting)))
            waiting.clear()

    for place, item in enumerate(ordered.items):
        if isinstance(item, Group):
            if not item.stages:
                continue  # it has become part of an earlier one
            waiting.append(launch_of(place, item, inside.get(place, ()), repeats, takeovers, verify))
            continue
        if isinstance(item, Allocate):
            continue  # memory is made when it is first needed
        flush()
        if isinstance(item, If | While | Invoke):
            bodies[len(steps)] = tuple(make_plan(body, machine, native, verify, fuse) for body in bodies_of(item))
        if place in ordered.alone:
            alone[len(steps)] = ordered.alone[place]
        steps.append(item)
    flush()
    program = with_views(program, takeovers.taken)
    layouts = Layouts(program)
    arenas = Arenas(program, layouts, {takeovers.storage(name) for name in takeovers.shared})
    parts = with_parted_runs(program, steps, arenas)
    at = list(itertools.accumulate(map(len, parts), initial=0))  # the new place of every step
    steps = list(itertools.chain.from_iterable(parts))
    regions = Regions(layouts, machine)
    planned = [regions.shared(step) if isinstance(step, Run) else step for step in arenas.planned(steps)]
    return Plan(
        program,
        tuple(planned),
        last_uses(program, steps, layouts),
        {at[place]: reason for place, reason in alone.items()},
        tuple(ordered.refusals),
        {at[place]: plans for place, plans in bodies.items()},
        takeovers.taken,
    )


def launch_of(
    place: int, group: Group, inside: tuple[str, ...], repeats: Repeats, takeovers: Takeovers, verify: bool
) -> Launch:
    repeat = repeats.of(group, inside)
    taken = takeovers.at(place, group, repeat.arguments)
    one = {old: later(old, taken)[-1] for old in taken}
    kernel = repeat.kernel(one)
    if verify:
        built = build(group, inside, repeats.layouts, repeats.machine)
        verify_kernel(built.kernel)
        if canonical(built.kernel, one) != kernel or built.arguments != repeat.arguments:
            raise AssertionError(f"groups that are no repeats of each other have one signature:\n{kernel}")
    arguments = tuple(takeovers.storage(name) for name in repeat.arguments if name not in taken)
    return Launch(kernel, arguments, repeat.pattern.kernel.sizes, group.operations)


__all__ = ["Launch", "Plan", "Run", "Step", "make_plan"]
