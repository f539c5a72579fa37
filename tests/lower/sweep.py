"""Every operator torch has sample inputs for, lowered, interpreted, and compiled: one verdict each.

    python -m tests.lower.sweep                       every operator, float32, first samples
    python -m tests.lower.sweep sum nn.functional --dtypes float32 bfloat16 --backward --samples 5 --show
    python -m tests.lower.sweep sum --exact --record docs/operators.csv    its row, written anew

An operator is traced as a backend sees it (functional, under fake tensors), lowered, run by the interpreter and as
native code, and each is compared with eager: values by their distance from a float64 run, dtypes, shapes and strides
exactly.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import operator
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from ferrite.ir.program.interpret import interpret
from ferrite.ir.program.laws import verify_program
from ferrite.ir.program.nodes import Program, Template, call_of
from ferrite.ir.program.parse import parse
from ferrite.lower.graph import lower_module
from tests.executables import function_of as executable
from tests.executables import plan_of
from tests.rounding import DRAWS, is_float, nudged

OPERATORS = {f"{op.name}.{op.variant_test_name}".strip("."): op for op in op_db}
# torch's forward leaves out the places of its maxima where no gradient is asked for, as in a traced graph; its backward
# reads them all the same, outside of memory. Dynamo captures no such graph.
READS_OUTSIDE_IN_BACKWARD = {"sparse.mm.reduce"}
SEED = 42  # what the samples' own wrappers set, which a trace does not see
# Memory without contents has no values to compare; random values come from generators that a float64 run moves too.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
WIDER |= {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}
# How much finer double precision is than single: what a run in single precision is off by, scaled down by this, is
# what rounding does to the same computation in double.
DOUBLE_TO_SINGLE = 2**-29
# What rounding may do on top of what eager is off by, in units in the last place: of the element itself, and of the
# largest one, since an element may be the difference of others as large.
OWN_ULPS, LARGEST_ULPS = 4, 1
LARGEST_ULPS_UNMEASURED = 16  # where the call names the type to compute in, other inputs tell nothing of eager


@dataclass
class Verdict:
    """`kind`: lowered (no call inside), called (some), wrong, crashed, or untraced (torch itself cannot)."""

    kind: str
    why: str = ""
    calls: list[str] = field(default_factory=list)
    program: str = ""


def hardsigmoid(x: torch.Tensor) -> torch.Tensor:
    return (x + 3).clamp(0, 6) / 6


# In double precision eager is the measure, but for what its kernel computes less exactly than that.
INEXACT = {"nn.functional.hardsigmoid": hardsigmoid}  # a sixth is a 32-bit float there, whatever the type


def judge(info: Any, sample: Any, backward: bool) -> Verdict:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = [leaves[place] for place in places]

    def called(operator: Any, *given: torch.Tensor) -> Any:
        now = list(leaves)
        for place, tensor in zip(places, given, strict=True):
            now[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(now, spec)
        return operator(first, *args, **kwargs)

    def function_of(operator: Any) -> Any:
        call = functools.partial(called, operator)
        return with_gradients(call, seeds) if backward else call

    seeds: list[torch.Tensor] = []
    function = function_of(info.op)
    doubles = any(tensor.dtype is torch.float64 for tensor in tensors)
    measure = function_of(INEXACT[info.name]) if doubles and info.name in INEXACT else function
    torch.manual_seed(SEED)
    try:
        eager = measure(*map(copied, tensors))
    except Exception as problem:
        return Verdict("untraced", f"eager: {type(problem).__name__}")
    try:
        gm = traced(function, tensors)
    except Exception as problem:
        return Verdict("untraced", f"{type(problem).__name__}: {str(problem)[:100]}")
    try:
        lowered = lower_module(gm)
        text = str(verify_program(lowered.program))
        assert parse(text) == lowered.program, "the text does not read back"
    except Exception as problem:
        return Verdict("crashed", f"lowering: {type(problem).__name__}: {problem}")
    found = [(call_of(item), item) for item in lowered.program.operations]
    calls = [
        f"{call.operator}: {call.reason}" for call, item in found if call is not None and not isinstance(item, Template)
    ]
    exact = None if info.name in UNDEFINED else Reference(measure, tensors, seeds)
    names_type = any(isinstance(leaf, torch.dtype) for leaf in leaves)
    expected = pytree.tree_leaves(eager)
    for way, run in (("interpreted", interpret), ("compiled", compiled)):
        torch.manual_seed(SEED)
        try:
            # as AOTAutograd calls it: nothing is differentiated here, gradients are results
            ours = run(lowered.program, [copied(tensor).detach() for tensor in tensors], lowered.objects)
        except Exception as problem:
            return Verdict("crashed", f"{way}: {type(problem).__name__}: {str(problem)[:200]}", calls, text)
        why = difference(ours, expected, exact, names_type)
        if why and not ("strides" in why and why == difference(call_by_call(gm, tensors), expected, None, False)):
            return Verdict("wrong", f"{way}: {why}", calls, text)
        # else some formulas of gradients are others where they are traced: no backend sees eager's
    return Verdict("called" if calls else "lowered", "", calls, text)


def compiled(program: Program, tensors: list[torch.Tensor], objects: Mapping[str, Any]) -> list[Any]:
    """What native code makes of a program."""
    return list(executable(plan_of(program), objects)(tensors))


def call_by_call(gm: torch.fx.GraphModule, tensors: list[torch.Tensor]) -> list[Any]:
    """What torch makes of the graph that it traced."""
    torch.manual_seed(SEED)
    return list(gm(*(copied(tensor).detach() for tensor in tensors)))


def traced(function: Any, tensors: list[torch.Tensor]) -> torch.fx.GraphModule:
    def flat(*args: torch.Tensor) -> list[Any]:
        return pytree.tree_leaves(function(*args))

    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [
        mode.from_tensor(tensor.detach().clone() if tensor.layout is not torch.strided else tensor.detach())
        for tensor in tensors
    ]
    for fake, tensor in zip(fakes, tensors, strict=True):
        fake.requires_grad_(tensor.requires_grad)
    with mode:  # autograd first, then without mutation
        joint = make_fx(flat)(*fakes)
        plain = [fake.detach() for fake in fakes]
        return make_fx(torch.func.functionalize(joint, remove="mutations"))(*plain)


def with_gradients(call: Any, made: list[torch.Tensor]) -> Any:
    """Results, and gradients of all that has one, from seeds that do not add up to zero; the first call makes them."""

    def function(*tensors: torch.Tensor) -> Any:
        given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        outputs = [leaf for leaf in pytree.tree_leaves(call(*given)) if isinstance(leaf, torch.Tensor)]
        wanted = [leaf for leaf in outputs if leaf.requires_grad]
        if not wanted:
            return outputs
        if not made:
            made.extend(seed_for(leaf) for leaf in wanted)
        seeds = [seed.to(leaf.dtype) for seed, leaf in zip(made, wanted, strict=True)]
        inputs = [tensor for tensor in given if tensor.requires_grad]
        return outputs, list(torch.autograd.grad(wanted, inputs, seeds, allow_unused=True))

    return function


def seed_for(leaf: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-0.5, 1, leaf.numel(), device=leaf.device).reshape(leaf.shape)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor in a storage of its own, at the same place in it."""
    if tensor.layout is not torch.strided:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        storage = tensor.untyped_storage().clone()
        new.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    new = new.conj() if tensor.is_conj() else new
    new = new._neg_view() if tensor.is_neg() else new
    return new.detach().requires_grad_(tensor.requires_grad)


class Reference:
    """What a call computes in double precision; where it is computed so already, in single precision."""

    def __init__(self, function: Any, tensors: list[torch.Tensor], seeds: list[torch.Tensor]) -> None:
        self.function, self.tensors, self.seeds = function, tensors, seeds
        kinds = {tensor.dtype for tensor in tensors if is_float(tensor)}
        self.other = WIDER if kinds & set(WIDER) or not kinds else NARROWER

    @functools.cached_property
    def results(self) -> list[Any] | None:
        return self.run([to_type(tensor, self.other) for tensor in self.tensors], self.other is WIDER)

    @functools.cached_property
    def errors(self) -> list[torch.Tensor | None]:
        """What eager is off by, at most, where all it is given is rounded another way: once it may be right by luck."""
        found: list[torch.Tensor | None] = []
        for draw in range(DRAWS):
            generator = torch.Generator().manual_seed(draw)
            coarse = self.tensors if self.other is WIDER else [to_type(tensor, NARROWER) for tensor in self.tensors]
            coarse = [nudged(copied(tensor).detach(), generator) for tensor in coarse]
            seeds = [nudged(tensor.clone(), generator) for tensor in self.seeds]
            theirs, best = self.run(coarse, False, seeds), self.run([to_type(t, WIDER) for t in coarse], True, seeds)
            now = [distance(*pair) for pair in zip(theirs or (), best or (), strict=False)]
            found = [larger(*pair) for pair in zip(found, now, strict=True)] if found and now else now
        return found

    def run(self, given: list[torch.Tensor], wide: bool, seeds: Sequence[torch.Tensor] = ()) -> list[Any] | None:
        default, kept = torch.get_default_dtype(), list(self.seeds)
        try:
            self.seeds[:] = seeds or kept
            given = [copied(tensor).detach() for tensor in given]
            for new, old in zip(given, self.tensors, strict=True):
                new.requires_grad_(old.requires_grad)
            torch.manual_seed(SEED)
            torch.set_default_dtype(torch.float64 if wide else default)
            return pytree.tree_leaves(self.function(*given))
        except Exception:
            return None
        finally:
            self.seeds[:] = kept
            torch.set_default_dtype(default)


def to_type(tensor: torch.Tensor, types: Mapping[torch.dtype, torch.dtype]) -> torch.Tensor:
    return tensor.detach().to(types.get(tensor.dtype, tensor.dtype))


def distance(theirs: Any, best: Any) -> torch.Tensor | None:
    if not (isinstance(theirs, torch.Tensor) and isinstance(best, torch.Tensor)) or theirs.shape != best.shape:
        return None
    return (to_type(theirs.to_dense(), WIDER) - to_type(best.to_dense(), WIDER)).abs().nan_to_num(0, 0, 0)


def larger(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    return None if first is None or second is None else torch.maximum(first, second)


def difference(ours: list[Any], eager: list[Any], exact: Reference | None, names_type: bool) -> str | None:
    """What tells ours from eager's; without a reference, values do not count. `names_type`: the call does."""
    if len(ours) != len(eager):
        return f"{len(ours)} results instead of {len(eager)}"
    for place, (mine, theirs) in enumerate(zip(ours, eager, strict=True)):
        if not isinstance(theirs, torch.Tensor):
            if mine != theirs and not (mine != mine and theirs != theirs):
                return f"result {place}: {mine} instead of {theirs}"
            continue
        looks = [(t.dtype, tuple(t.shape), t.layout, t.device.type) for t in (mine, theirs)]
        if looks[0] != looks[1]:
            return f"result {place}: {looks[0]} instead of {looks[1]}"
        if theirs.layout is not torch.strided:
            mine, theirs = mine.to_dense(), theirs.to_dense()
        elif theirs.numel() and strides(mine) != strides(theirs):
            return f"result {place}: strides {mine.stride()} instead of {theirs.stride()}"
        if exact is not None and (problem := values_differ(mine, theirs, place, exact, names_type)):
            return f"result {place}: {problem}"
    return None


def strides(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def values_differ(
    mine: torch.Tensor, theirs: torch.Tensor, place: int, exact: Reference, names_type: bool
) -> str | None:
    mine, theirs = (tensor.detach().resolve_conj().resolve_neg() for tensor in (mine, theirs))
    if theirs.dtype is torch.complex32:  # torch compares no complex numbers of 16-bit floats
        mine, theirs = mine.to(torch.complex64), theirs.to(torch.complex64)
    if torch.equal(mine, theirs):
        return None
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return f"{int((mine != theirs).sum())} elements differ"
    best, error, is_measured = judged(theirs, exact.results, place)
    a, b = mine.to(best.dtype), theirs.to(best.dtype)
    limits = torch.finfo(theirs.abs().dtype)
    size = best.abs().nan_to_num(0, 0, 0)
    largest = size.max() * LARGEST_ULPS
    if names_type or not is_measured:  # gradients are sums of terms as large as what was given for them
        sizes = [size.max(), *(seed.abs().max() for seed in exact.seeds if seed.numel())]
        largest = max(sizes) * LARGEST_ULPS_UNMEASURED
    rounding = limits.eps * (OWN_ULPS * size + largest) + limits.tiny
    wrong = ~((a == b) | (a.isnan() & b.isnan())) & ~((a - best).abs() <= 4 * error + 2 * error.max() + rounding)
    often = exact.errors[place] if bool(wrong.any()) and place < len(exact.errors) else None
    if often is not None and often.shape == error.shape:
        error = torch.maximum(error, often * (DOUBLE_TO_SINGLE if theirs.dtype == best.dtype else 1))
        wrong &= (a - best).abs() > 4 * error + 2 * error.max() + rounding
    if not bool(wrong.any()):
        return None
    example = f"{mine[wrong].flatten()[0]} for {theirs[wrong].flatten()[0]}"
    return f"{int(wrong.sum())} elements farther from float64 than eager, e.g. {example}"


def judged(theirs: torch.Tensor, known: list[Any] | None, place: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The best values there are, what eager is off by, and whether that could be measured. In double precision eager
    is the best there is."""
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    here = theirs.to(wide)
    other = known[place] if known is not None else theirs
    if other.layout is not torch.strided:
        other = other.to_dense()
    if other.shape != theirs.shape:
        other = theirs
    error = (other.detach().to(wide) - here).abs().nan_to_num(0, 0, 0)
    if theirs.dtype == wide:
        return here, error * DOUBLE_TO_SINGLE, other.dtype != wide
    return (other.detach() if other.dtype == wide else here).to(wide), error, other.dtype == wide


def sweep(name: str, dtype: torch.dtype, backward: bool = False, samples: int = 3) -> list[Verdict]:
    """One verdict per sample; an operator that does not know the type has none."""
    info = OPERATORS[name]
    known = info.backward_dtypes if backward else info.dtypes
    if backward and name in READS_OUTSIDE_IN_BACKWARD:
        return []
    if dtype not in known or (
        backward and not (info.supports_autograd and (dtype.is_floating_point or dtype.is_complex))
    ):
        return []
    found = itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=backward), samples)
    return [judge(info, sample, backward) for sample in found]


ORDER = ("crashed", "wrong", "called", "lowered", "untraced")
RECORDED_TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.complex64]
HEAD = ["operator", "float32", "all types", "backward", "calls"]


def worst(verdicts: list[Verdict]) -> Verdict:
    return min(verdicts, key=lambda verdict: ORDER.index(verdict.kind))


def summary(name: str) -> list[str]:
    """One row of the record, by first samples: the worst verdict forward with the first type, with all, backward; and
    what is called."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = [sweep(name, RECORDED_TYPES[0], False, 1)]
    found += [[verdict for dtype in RECORDED_TYPES for verdict in sweep(name, dtype, way, 1)] for way in (False, True)]
    kinds = [worst(verdicts).kind if verdicts else "" for verdicts in found]
    calls = dict.fromkeys(call.split(":")[0] for verdicts in found for verdict in verdicts for call in verdict.calls)
    return [name, *kinds, " ".join(calls)]


def recorded(path: Path) -> dict[str, dict[str, str]]:
    """Rows by operator."""
    with path.open(newline="") as file:
        return {row["operator"]: row for row in csv.DictReader(file) if row["operator"] != "---"}


def record(path: Path, names: list[str]) -> None:
    """Write a row for each of these operators; rows of others stay as they are."""
    found = {name: list(row.values()) for name, row in recorded(path).items()} if path.exists() else {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for place, row in enumerate(pool.map(summary, names)):
            print(f"{place + 1} of {len(names)} {row[0]}", end="\033[K\r", file=sys.stderr)
            found[row[0]] = row
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerows([HEAD, ["---"] * len(HEAD), *(found[name] for name in sorted(found))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of operator names; none means all")
    parser.add_argument("--exact", action="store_true", help="names are whole names")
    parser.add_argument("--dtypes", nargs="*", default=["float32"])
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--show", action="store_true", help="print the programs")
    parser.add_argument("--bad", action="store_true", help="print only what is wrong or crashed")
    parser.add_argument("--record", metavar="CSV", type=Path, help="write their rows of the record")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    fits = operator.eq if args.exact else operator.contains
    wanted = [name for name in sorted(OPERATORS) if not args.names or any(fits(name, part) for part in args.names)]
    dtypes = [getattr(torch, text) for text in args.dtypes]
    if args.record:
        record(args.record, wanted)
        return
    count: Counter[str] = Counter()
    for name in wanted:
        for dtype in dtypes:
            verdicts = sweep(name, dtype, args.backward, args.samples)
            if not verdicts:
                continue
            verdict = worst(verdicts)
            count[verdict.kind] += 1
            if args.bad and verdict.kind not in ("crashed", "wrong"):
                continue
            note = verdict.why or "; ".join(dict.fromkeys(verdict.calls))[:150]
            print(f"{name:45} {str(dtype)[6:]:10} {verdict.kind:9} {note}", flush=True)
            if args.show:
                print(verdict.program)
    print(dict(count))


if __name__ == "__main__":
    main()
