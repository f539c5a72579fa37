"""Whether a compiled program does what eager does, and if not, whether the difference is ours or torch's.

Everything a caller can see is compared, call by call: dtypes, shapes, strides, sharing of memory among inputs and
results, contents of the inputs after the call, gradients, classes of errors. Values are judged by the rule of the
tests, against a run in float64. Where that rule is broken, the program is run again with every line's result off by a
few units in the last place, and by as much as eager is off there from float64, or exactly 0 where eager has nothing but
such an error: what this alone can bring about is no fault. `layer_norm(x) > 0` is true or false by chance where x is
its mean: eager may have -1e-8 there, and float64 1e-17. What is computed in float64 has no wider run
to be judged against, and an operator that loses digits inside of itself shows nothing of it when its result is off by a
little: there each line is off by two units of the largest number it reads or makes, too, and how far eager itself may
be off is read off a run in float32, in units of the last place. A size that data decides may be the one of the run in
float64, where eager's rounding decides on another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from bench.programs.program import Program
from tests.compare import Run, assert_same_tensor, loss_of, sharing, tensors_in

NUDGES = 8  # runs with results off by a little
UNITS = 4.0  # by how many units in the last place
LOST = 2.0  # by how many units of the largest number at hand, in float64
ROOM = 8.0  # how much more than such a run we may be off
Outcome = Run | Exception
COMPILED = {  # how: by which backend, and whether for sizes that may be others
    "ferrite": ("ferrite", True),
    "ferrite as users have it": ("ferrite", True),
    "aot_eager": ("aot_eager", True),
    "aot_eager, sizes known": ("aot_eager", False),
    "as Dynamo traced it": ("eager", True),
}
TORCHS_OWN = ("aot_eager", "aot_eager, sizes known", "as Dynamo traced it")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came out of comparing a program with eager.

    `fault` is "" (none), "wrong", "error" (raised, or raised otherwise), "torch" (everything that differs differs in
    the same way with one of torch's own backends), "crashed" or "refused" (eager itself cannot make the inputs).
    """

    fault: str
    detail: str = ""

    @property
    def family(self) -> str:
        """The detail without what differs between a program and a smaller one with the same fault."""
        if self.fault == "error":
            return "error " + re.sub(r"[^A-Za-z ]+", "", self.detail)[:60]
        for word in ("strides", "sharing", "dtype", "shape", "device", "requires_grad", "is_leaf"):
            if word in self.detail:
                return f"{self.fault} {word}"
        return self.fault


def judge(program: Program) -> Verdict:
    try:
        eager = observe(program, "eager")
    except Exception as problem:  # the inputs themselves: a smaller program may have none
        return Verdict("refused", str(problem))
    wide = observe(program, "float64")
    ours = observe(program, "ferrite")
    problems = differences(program, ours, eager, wide)
    if problems and any(isinstance(run, Exception) for run in eager):
        # eager's own error, met while compiling, is wrapped in ours by `strict` alone
        problems = differences(program, observe(program, "ferrite as users have it"), eager, wide)
    if not problems:
        return Verdict("")
    left = dict(problems)
    for how in TORCHS_OWN:
        theirs = observe(program, how)
        # what torch refuses under any backend, `strict` reports under a name of our own
        if any(both_raised(mine, other) for mine, other in zip(ours, theirs, strict=True)):
            return Verdict("torch", first(problems))
        ours_alone = differences(program, ours, theirs, wide)
        left = {seen: problem for seen, problem in left.items() if seen in ours_alone}
        if not left:
            return Verdict("torch", first(problems))
    return Verdict("error" if any(isinstance(run, Exception) for run in ours) else "wrong", first(left))


AfterLine = Callable[..., None]  # is told what a line made or wrote, and what it was made of


def observe(program: Program, how: str, after_line: AfterLine | None = None) -> list[Outcome]:
    """What a caller sees of each call: of the program in eager, in float64, or compiled by a backend."""
    wide = how == "float64"
    definition = program.definition(after_each="after_line({0}, {1})" if after_line else "")
    scope: dict[str, Any] = {"torch": torch, "after_line": after_line}
    maker = program.maker(wide=wide)
    if wide:
        definition = re.sub(r"torch\.(bfloat16|float32)\b", "torch.float64", definition)
    elif how == "float32":
        maker, definition = (re.sub(r"torch\.float64\b", "torch.float32", text) for text in (maker, definition))
    exec(maker, scope)
    exec(definition, scope)
    function = scope["program"]
    torch._dynamo.reset()
    torch._dynamo.config.capture_scalar_outputs = program.from_data
    torch._dynamo.config.capture_dynamic_output_shape_ops = program.from_data
    if how in COMPILED:
        backend, any_sizes = COMPILED[how]
        options = {"options": {"strict": True}} if how == "ferrite" else {}
        dynamic = (program.dynamic or None) if any_sizes else False
        function = torch.compile(function, backend=backend, dynamic=dynamic, **options)
    if wide:
        function = in_float64(function)
    with default_device(program.device):
        return [one_outcome(program, number, function, scope["inputs"]) for number in range(len(program.calls))]


def in_float64(function: Any) -> Any:
    """What becomes a float without saying which (`x / 2` of integers) is one of 64 bits, too."""

    def call(*arguments: Any) -> Any:
        kept = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return function(*arguments)
        finally:
            torch.set_default_dtype(kept)

    return call


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    """Tensors are made there, by programs that are compiled too."""
    if name == "cpu":
        yield
        return
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def one_outcome(program: Program, number: int, function: Any, inputs: Any) -> Outcome:
    leaves, arguments = inputs(**{name: program.calls[number][name] for name in program.sizes})
    torch.manual_seed(number + 1)  # where it nudges, each run otherwise
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return one_call(program, function, leaves, arguments)
    except Exception as error:
        return error


def one_call(program: Program, function: Any, leaves: list[Any], arguments: list[Any]) -> Run:
    outputs = function(*arguments)
    gradients: dict[str, torch.Tensor | None] = {}
    if program.training and any(tensor.requires_grad for tensor in tensors_in(outputs)):
        loss_of(outputs).backward()
        gradients = {f"leaf {i}": leaf.grad for i, leaf in enumerate(leaves)}
    return Run(outputs, [leaves, arguments], {}, gradients, torch.empty(0))


SOURCE = torch.Generator()  # of nudges: another one than the program's


@dataclasses.dataclass(frozen=True)
class Line:
    """What a line made in eager, and how far that is off from the same line in float64, element by element."""

    made: torch.Tensor
    error: torch.Tensor

    def put_off(self, value: torch.Tensor, cancels: bool) -> torch.Tensor:
        """A value that this line made in another run, off by as much as eager's is. `cancels`: what has no digit that
        is right is 0; a number that has become so earlier stays it."""
        if value.shape != self.made.shape:
            return value
        if cancels:
            return torch.where((2 * self.error >= self.made.abs()) & (self.error > 0), 0, value)
        moved = value + (self.error * noise(self.error, UNITS / torch.finfo(torch.float64).eps)).to(value.dtype)
        return torch.where((value == 0) & (self.made != 0), value, moved)


def nudging(lines: list[Line | None], cancels: bool = False) -> AfterLine:
    """Puts what lines make off by a little, and later its gradient."""
    left = iter(lines)

    def nudge(value: Any, *operands: Any) -> None:
        line = next(left, None)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return
        new = nudged(value.data, operands)
        try:
            value.data.copy_(new if line is None else line.put_off(new, cancels))
        except RuntimeError:  # elements that share memory
            return
        if value.requires_grad:
            value.register_hook(nudged)

    return nudge


def lines_of(program: Program) -> list[Line | None]:
    """What eager's lines make, and how far they are off; None where nobody knows: of whole numbers, and in float64."""
    made: dict[str, list[torch.Tensor | None]] = {"eager": [], "float64": []}
    for how, values in made.items():

        def note(value: Any, *_operands: Any, values: list[torch.Tensor | None] = values) -> None:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            values.append(value.detach().double().clone() if is_float else None)

        observe(program, how, note)
    if len(made["eager"]) != len(made["float64"]):  # one of them raised
        return []
    return [line_of(*pair) for pair in zip(made["eager"], made["float64"], strict=True)]


def line_of(eager: torch.Tensor | None, wide: torch.Tensor | None) -> Line | None:
    if eager is None or wide is None or eager.shape != wide.shape:
        return None
    return Line(eager, (eager - wide).abs().nan_to_num(0, 0, 0))


def nudged(value: torch.Tensor, operands: Iterable[Any] = ()) -> torch.Tensor:
    """A tensor off by a few units in the last place, as rounding may leave it. In float64 also by units of the largest
    number that it was made of, since an operator may round a number as large on its way to a small one. What is 0 stays
    so: it is exact more often than not, and programs decide by it."""
    found = value * (1 + noise(value, UNITS))
    if value.dtype is not torch.float64:
        return found
    at_hand = [value, *(each for each in operands if isinstance(each, torch.Tensor) and each.is_floating_point())]
    largest = max(map(largest_finite, at_hand))
    return torch.where(value == 0, value, found + largest * noise(value, LOST))


def noise(like: torch.Tensor, units: float) -> torch.Tensor:
    """Random numbers of a size, up to some units of one."""
    unit = units * torch.finfo(like.dtype).eps
    numbers = torch.rand(like.shape, generator=SOURCE, dtype=torch.float64, device="cpu")
    return (unit * (numbers * 2 - 1)).to(like.device, like.dtype)


def largest_finite(tensor: torch.Tensor) -> float:
    finite = tensor.detach()[tensor.detach().isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


# --- comparing --------------------------------------------------------------------------------------------------------


Seen = tuple[int, str, str]  # the number of a call, what was looked at, and which fact about it


def first(problems: Mapping[Seen, str]) -> str:
    return next(iter(problems.values()))


def difference(program: Program, ours: list[Outcome], theirs: list[Outcome], wide: list[Outcome]) -> str | None:
    """The first thing that differs, or None."""
    problems = differences(program, ours, theirs, wide)
    return first(problems) if problems else None


def differences(program: Program, ours: list[Outcome], theirs: list[Outcome], wide: list[Outcome]) -> dict[Seen, str]:
    """Everything that differs."""
    found: dict[Seen, str] = {}
    for number, (mine, other, exact) in enumerate(zip(ours, theirs, wide, strict=True)):
        where = f"call {number}: " if len(ours) > 1 else ""
        if isinstance(mine, Exception) or isinstance(other, Exception):
            if type(mine) is not type(other):
                found[number, "call", "error"] = f"{where}{described(mine)} instead of {described(other)}"
            continue
        known = exact if isinstance(exact, Run) else None
        for (name, fact), problem in differences_of_runs(program, number, mine, other, known).items():
            found[number, name, fact] = where + problem
    return found


def both_raised(mine: Outcome, other: Outcome) -> bool:
    return isinstance(mine, Exception) and isinstance(other, Exception)


def described(outcome: Outcome) -> str:
    if isinstance(outcome, Run):
        return "results"
    lines = [line for line in str(outcome).splitlines() if line.strip()]
    return f"{type(outcome).__name__}: {' '.join(lines[:3])[:300]}"


def differences_of_runs(
    program: Program, call: int, ours: Run, eager: Run, wide: Run | None
) -> dict[tuple[str, str], str]:
    mine, theirs = seen(ours), seen(eager)
    exact = seen(wide) if wide is not None else {}
    if mine.keys() != theirs.keys():
        return {("results", "names"): f"results {sorted(mine)} instead of {sorted(theirs)}"}
    found: dict[tuple[str, str], str] = {}
    numbers: dict[str, str] = {}
    for name, tensor in list(mine.items()):
        looks = dict(differences_of_looks(tensor, theirs[name]))
        if looks.keys() == {"number"}:
            numbers[name] = f"{name}: {looks['number']}"
            continue
        if looks and rounding_decides(program, tensor, theirs[name], exact.get(name)):
            del mine[name]
            continue
        found |= {(name, fact): f"{name}: {problem}" for fact, problem in looks.items()}
        if looks.keys() & {"type", "dtype", "shape", "device"}:
            del mine[name]  # no values to compare
    if sharing(ours) != sharing(eager):
        found["results", "sharing"] = f"sharing among inputs and results {sharing(ours)} instead of {sharing(eager)}"
    suspects = dict(values_that_differ(mine, theirs, exact)) | numbers
    mine, theirs, exact = map(numbers_as_tensors, (mine, theirs, exact))
    excused = explained_by_rounding(program, call, mine, theirs, exact, suspects) if suspects else set()
    return found | {(name, "values"): problem for name, problem in suspects.items() if name not in excused}


def numbers_as_tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    """A number that data decides is judged as a tensor of it is."""
    return {name: torch.tensor(each) if isinstance(each, (int, float)) else each for name, each in values.items()}


def rounding_decides(program: Program, mine: Any, theirs: Any, exact: Any) -> bool:
    """Whether data decides a size, and eager has another than it has itself in float64, which is ours."""
    if not program.from_data or not all(isinstance(each, torch.Tensor) for each in (mine, theirs, exact)):
        return False
    return bool(mine.shape == exact.shape != theirs.shape and mine.dtype == theirs.dtype)


def seen(run: Run) -> dict[str, Any]:
    """Everything a caller can look at, by name: tensors, numbers and None."""
    found: dict[str, Any] = {f"output {i}": value for i, value in enumerate(run.outputs)}
    leaves, arguments = run.inputs
    found |= {f"leaf {i}": value for i, value in enumerate(leaves)}
    found |= {f"input {i}": value for i, value in enumerate(arguments)}
    return found | {f"gradient of {name}": value for name, value in run.gradients.items()}


LOOKS = ("dtype", "shape", "device", "requires_grad", "is_leaf")


def differences_of_looks(mine: Any, theirs: Any) -> Iterable[tuple[str, str]]:
    if type(mine) is not type(theirs):
        yield "type", f"{type(mine).__name__} instead of {type(theirs).__name__}"
    elif not isinstance(mine, torch.Tensor):
        if mine != theirs:
            yield "number", f"{mine} instead of {theirs}"
    else:
        for fact in LOOKS:
            if getattr(mine, fact) != getattr(theirs, fact):
                yield fact, f"{fact} {getattr(mine, fact)} instead of {getattr(theirs, fact)}"
        if mine.stride() != theirs.stride():
            yield "strides", f"strides {mine.stride()} instead of {theirs.stride()}"


def values_that_differ(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], exact: Mapping[str, Any]
) -> Iterable[tuple[str, str]]:
    for name, tensor in mine.items():
        if isinstance(tensor, torch.Tensor):
            true = exact.get(name)
            true = true if isinstance(true, torch.Tensor) and true.shape == tensor.shape else theirs[name]
            bare = [each.detach().contiguous() for each in (tensor, theirs[name], true)]  # looks are compared before
            try:
                assert_same_tensor(*bare, name)
            except AssertionError as problem:
                yield name, str(problem).splitlines()[0]


def explained_by_rounding(
    program: Program,
    call: int,
    mine: Mapping[str, Any],
    theirs: Mapping[str, Any],
    exact: Mapping[str, Any],
    suspects: Iterable[str],
) -> set[str]:
    """Those tensors whose difference a few units in the last place on the way can bring about, element by element."""
    SOURCE.manual_seed(0)
    lines = lines_of(program)
    nudged = [observe(program, "eager", nudging(lines, cancels=not number))[call] for number in range(NUDGES)]
    if not all(isinstance(run, Run) for run in nudged):
        return set(suspects)
    runs = [numbers_as_tensors(seen(run)) for run in nudged if isinstance(run, Run)]
    narrow = observe(program, "float32")[call] if any(is_double(theirs[name]) for name in suspects) else None
    narrower = seen(narrow) if isinstance(narrow, Run) else {}
    room = {name: own_error(theirs[name], narrower.get(name)) for name in suspects}
    return {
        name
        for name in suspects
        if not all(isinstance(run.get(name), torch.Tensor) for run in runs)
        or any(run[name].shape != theirs[name].shape for run in runs)
        or near(mine[name], theirs[name], [run[name] for run in runs], exact.get(name), room[name])
    }


def is_double(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float64


def own_error(theirs: torch.Tensor, narrow: Any) -> float:
    """How far eager may be off in float64: as far as it is in float32, in units of the last place."""
    if not is_double(theirs) or not isinstance(narrow, torch.Tensor) or narrow.shape != theirs.shape:
        return 0.0
    apart = narrow.detach().double() - theirs.detach()
    return largest_finite(apart) * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


def near(mine: torch.Tensor, theirs: torch.Tensor, nudged: list[torch.Tensor], exact: Any, own: float) -> bool:
    if not mine.numel():
        return True
    ours, eager = mine.detach().double(), theirs.detach().double()
    others = torch.stack([each.detach().double() for each in nudged])
    steady = (others.isfinite() == eager.isfinite()).all(0)  # elsewhere anything may come out
    settled = eager.isfinite() & others.isfinite().all(0)
    allowed = ROOM * (others - eager).abs().amax(0) + ROOM * own
    if theirs.is_floating_point():
        largest = eager[eager.isfinite()].abs().max() if eager.isfinite().any() else 0.0
        allowed = allowed + 16 * torch.finfo(theirs.dtype).eps * largest + torch.finfo(theirs.dtype).tiny
        if isinstance(exact, torch.Tensor) and exact.shape == eager.shape:
            allowed = allowed + 2 * (exact.detach().double() - eager).abs().nan_to_num(0, 0, 0)
    fine = torch.where(settled, (ours - eager).abs() <= allowed, same(ours, eager))
    if isinstance(exact, torch.Tensor) and exact.shape == eager.shape:
        fine |= same(ours, exact.detach().double())  # an infinity or NaN that only rounding keeps from eager
    return bool((fine | ~steady).all())


def same(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left == right) | (left.isnan() & right.isnan())
