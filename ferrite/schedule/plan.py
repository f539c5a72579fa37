"""The plan of a program: launches of kernels and other operations in order, and what each leaves behind."""

from __future__ import annotations

from collections.abc import Mapping

from ferrite.ir.canonical import canonical
from ferrite.ir.kernel_laws import verify_kernel
from ferrite.ir.program import Allocate, If, Invoke, Program, While
from ferrite.ir.questions import bodies_of
from ferrite.schedule.groups import Group
from ferrite.schedule.in_place import Takeovers, with_views
from ferrite.schedule.kernels import build
from ferrite.schedule.machine import Machine
from ferrite.schedule.memory import last_uses, private, private_to_runs, with_arena
from ferrite.schedule.order import Native, Order
from ferrite.schedule.prepare import prepare
from ferrite.schedule.steps import Launch, Plan, Run, Step
from ferrite.schedule.touches import Layouts


def make_plan(program: Program, machine: Machine, native: Native, verify: bool = False, fuse: bool = True) -> Plan:
    program = prepare(program)
    ordered = Order(program, machine, native, fuse).run()
    layouts = Layouts(program)
    inside = private(program, ordered.items, layouts)
    takeovers = Takeovers(program, ordered.items, layouts)
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
            own = inside.get(place, ())
            waiting.append(launch_of(item, own, takeovers.at(place, item, own), takeovers, machine, verify))
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
    dying = last_uses(program, steps, layouts)
    alone_in = private_to_runs(program, steps, layouts)
    planned = [
        with_arena(step, alone_in[at], layouts) if isinstance(step, Run) else step for at, step in enumerate(steps)
    ]
    return Plan(program, tuple(planned), dying, alone, tuple(ordered.refusals), bodies, takeovers.taken)


def launch_of(
    group: Group,
    inside: tuple[str, ...],
    taken: Mapping[str, str],
    takeovers: Takeovers,
    machine: Machine,
    verify: bool,
) -> Launch:
    """`taken`: for storages that the kernel reads for the last time, those that take their memory over."""
    built = build(group, inside, takeovers.layouts, machine)
    there = set(built.arguments)
    one = {old: new for old, new in taken.items() if old in there and new in there}
    kernel = canonical(built.kernel, one)
    if verify:
        verify_kernel(built.kernel)
        verify_kernel(kernel)
    arguments = tuple(takeovers.storage(name) for name in built.arguments if name not in one)
    return Launch(kernel, arguments, built.kernel.sizes, group.operations)


__all__ = ["Launch", "Plan", "Run", "Step", "make_plan"]
