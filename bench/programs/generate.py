"""A random program of a kind, from a number: the same number gives the same program."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from bench.programs.program import Input, Program, Size, Step
from bench.programs.steps import DTYPES, FLOATS, KINDS, Choice

SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 8, 8, 12, 16, 17)
LARGEST = 4096  # elements of a value: programs are about what is computed, not how much
ATTEMPTS = 60  # lines tried per program, most of which do not fit
PROGRAMS = ("static", "dynamic", "training")


def generate(kind: str, seed: int, device: str = "cpu") -> Program:
    """The program of a kind ("static", "dynamic" or "training") and a number, the same one for every device."""
    source = random.Random(f"{kind} {seed}")
    while True:
        found = attempt(kind, source)
        if found is not None:
            return replace(found, device=device)


def attempt(kind: str, source: random.Random) -> Program | None:
    dynamic = kind == "dynamic" or (kind == "training" and source.random() < 0.3)
    from_data = kind != "training" and source.random() < (0.3 if dynamic else 0.1)
    inputs = random_inputs(source, dynamic)
    calls = random_calls(source, dynamic)
    program = Program(inputs, (), (), calls, dynamic, kind == "training", from_data)
    program = replace(program, inputs=program.inputs, calls=tuple({n: c[n] for n in program.sizes} for c in calls))
    try:
        scopes = [scope_of(program, call) for call in program.calls]
    except (RuntimeError, IndexError):
        return None
    families = weights(source, program)
    length = source.choice((2, 3, 4, 4, 5, 6, 8))
    steps: list[Step] = []
    for _ in range(ATTEMPTS):
        if len(steps) >= length:
            break
        made, *_ = source.choices(KINDS, [weight * families[family] for _, family, weight in KINDS])[0]
        step = made(Choice(source, scopes[0]))
        if not step:
            continue
        step = replace(step, target=new_names(step.target, steps))
        if fits(step, scopes):
            steps.append(step)
    results = random_results(source, scopes[0], steps)
    if not results or (program.training and not any(grows(scopes[0][name]) for name in results)):
        return None
    return replace(program, steps=tuple(steps), results=results)


def grows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def weights(source: random.Random, program: Program) -> Mapping[str, float]:
    """How often each family of lines comes: every program has its own taste."""
    families = {family: source.choice((0.0, 0.5, 1.0, 3.0)) for family in sorted({family for _, family, _ in KINDS})}
    families["elements"] = max(families["elements"], 0.5)
    if not program.from_data:
        families["data"] = 0.0
    elif families["data"] == 0.0:
        families["data"] = 1.0
    return families


def random_inputs(source: random.Random, dynamic: bool) -> tuple[Input, ...]:
    main = source.choice(FLOATS[:1] * 5 + DTYPES)
    shape = tuple(random_size(source, dynamic) for _ in range(source.choice((0, 1, 1, 2, 2, 2, 3, 3, 4))))
    inputs: list[Input] = []
    for number in range(source.choice((1, 2, 2, 3))):
        name = f"x{number}"
        if inputs and source.random() < 0.06:
            earlier = source.choice(inputs)
            layout = source.choice(("{}", "{}[1:]", "{}.t()", "{}.view(-1)"))
            inputs.append(Input(name, earlier.shape, earlier.dtype, layout, base=earlier.name))
            continue
        dtype = main if source.random() < 0.6 else source.choice(DTYPES)
        mine = changed(source, shape)
        if source.random() < 0.15:  # indices
            inputs.append(Input(name, (source.choice((0, 1, 2, 3, 5, 9)),), "int64", values=f"below {bound(shape)}"))
            continue
        values = source.choice(("normal", "eighths")) if "float" in dtype else "small"
        inputs.append(laid_out(source, Input(name, mine, dtype, values=values)))
    return tuple(inputs)


def bound(shape: tuple[Size, ...]) -> Size:
    return shape[0] if shape and shape[0] != 0 else 2


def random_size(source: random.Random, dynamic: bool) -> Size:
    if dynamic and source.random() < 0.75:
        return source.choice(("s0", "s0", "s1", "s2"))
    return 0 if source.random() < 0.03 else source.choice(SIZES)


def random_calls(source: random.Random, dynamic: bool) -> tuple[dict[str, int], ...]:
    """Sizes per call. Some of them are equal in the first call, and not in later ones."""
    if not dynamic:
        return ({},)
    calls = []
    for _ in range(source.choice((1, 2, 2, 3))):
        call = {name: 0 if source.random() < 0.04 else source.choice(SIZES) for name in ("s0", "s1", "s2")}
        if source.random() < 0.3:
            call["s1"] = call["s0"]
        calls.append(call)
    return tuple(calls)


def changed(source: random.Random, shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """A shape that likely broadcasts against this one: sizes of one, leading sizes left out."""
    kept = shape[source.randrange(len(shape)) :] if shape and source.random() < 0.2 else shape
    return tuple(1 if source.random() < 0.1 else size for size in kept)


def laid_out(source: random.Random, plain: Input) -> Input:
    """The input with memory that is not in order, in some cases. `shape` is the one of what is made."""
    shape = list(plain.shape)
    way = source.choice(("plain", "plain", "plain", "permuted", "stepped", "offset", "expanded"))
    if not shape or way == "plain":
        return plain
    axis = source.randrange(len(shape))
    before = ":, " * axis
    if way == "permuted":
        order = list(range(len(shape)))
        source.shuffle(order)
        made = [0] * len(shape)
        for place, origin in enumerate(order):
            made[origin] = shape[place]
        return replace(plain, shape=tuple(made), layout=f"{{}}.permute({', '.join(map(str, order))})")
    if way == "expanded":
        sizes = ", ".join(str(size) if i == axis else "-1" for i, size in enumerate(shape))
        shape[axis] = 1
        return replace(plain, shape=tuple(shape), layout=f"{{}}.expand({sizes})")
    factor = 2 if way == "stepped" else 1
    extra = 0 if way == "stepped" else 1
    size = shape[axis]
    text = f"{size}{' * 2' if factor == 2 else ''}{' + 1' if extra else ''}"
    shape[axis] = text if isinstance(size, str) else size * factor + extra
    return replace(plain, shape=tuple(shape), layout=f"{{}}[{before}{'::2' if way == 'stepped' else '1:'}]")


def scope_of(program: Program, call: Mapping[str, int]) -> dict[str, Any]:
    """The arguments of a call, by name."""
    scope: dict[str, Any] = {"torch": torch}
    exec(program.maker(), scope)
    _, arguments = scope["inputs"](**{name: call[name] for name in program.sizes})
    return dict(zip((each.name for each in program.inputs), arguments, strict=True))


def fits(step: Step, scopes: list[dict[str, Any]]) -> bool:
    """Runs a line in every call; whether none refuses it, and values stay small."""
    results = []
    for scope in scopes:
        space = {**scope, "torch": torch}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(step.line(), space)
        except Exception:  # whatever it is: this is a line for no program
            return False
        results.append([space[name] for name in step.targets])
    if any(isinstance(value, torch.Tensor) and value.numel() > LARGEST for each in results for value in each):
        return False
    for scope, values in zip(scopes, results, strict=True):
        scope.update(zip(step.targets, values, strict=True))
    return True


def new_names(target: str, steps: list[Step]) -> str:
    count = sum(len(step.targets) for step in steps)
    return ", ".join(f"v{count + i}" for i in range(len(target)))


def random_results(source: random.Random, scope: Mapping[str, Any], steps: list[Step]) -> tuple[str, ...]:
    made = [name for step in steps for name in step.targets]
    if not made and not steps:
        return ()
    names = made or sorted(scope)
    chosen = {names[-1]} | {name for name in names if source.random() < 0.35}
    if source.random() < 0.1:
        chosen.add(source.choice(sorted(scope)))
    results = [name for name in scope if name in chosen]
    if source.random() < 0.3:
        source.shuffle(results)
    return tuple(results)
