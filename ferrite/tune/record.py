"""A record of measurements: a text that can be read, committed and replayed.

    tuning record
    gpu: NVIDIA H200
    triton: 3.6.0
    torch: 2.11.0+cu128

    product bf16 1 x 8 x 4096 x 4096, summed, summed
        torch: 19.8 us
        ours: 14.2 us with 16 x 32 x 128, 4 warps, 4 stages, 8 in a column, 2 pieces

    call mylib.gelu.default for aten.gelu.default: bf16[8, 4096]
        torch: 4.1 us
        candidate: 3.9 us

It holds for the GPU and the versions that it was made with. Two of the same make one; of a problem that both have, the
second says how long it takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ferrite.errors import Refusal
from ferrite.tune.calls import CallProblem, CallTimes
from ferrite.tune.products import ProductConfig, ProductProblem

TITLE = "tuning record"
MAX_RATIO = 0.97  # of the time of torch's call, for another to be taken: times vary by as much
TORCH = re.compile(r"torch: (\d+\.\d+) us")
OURS = re.compile(r"ours: (\d+\.\d+) us with (.+)")
CANDIDATE = re.compile(r"candidate: (\d+\.\d+) us")


class InvalidRecord(ValueError):
    """A text that is no record: what is wrong, and on which line."""


@dataclass(frozen=True)
class Where:
    """What times are times of."""

    gpu: str
    triton: str
    torch: str


@dataclass(frozen=True)
class Measured:
    """Microseconds of torch's call and of the fastest kernel of ours, and how that is arranged."""

    torch: float
    ours: float
    config: ProductConfig

    @property
    def how(self) -> str:
        return str(self.config)


Problem = ProductProblem | CallProblem
Found = Measured | CallTimes


@dataclass(frozen=True)
class Record:
    where: Where
    products: Mapping[ProductProblem, Measured] = field(default_factory=dict)
    calls: Mapping[CallProblem, CallTimes] = field(default_factory=dict)

    @staticmethod
    def of(where: Where, found: Mapping[Problem, Found]) -> Record:
        products: dict[ProductProblem, Measured] = {}
        calls: dict[CallProblem, CallTimes] = {}
        for problem, times in found.items():
            (calls if isinstance(problem, CallProblem) else products)[problem] = times  # type: ignore[index, assignment]
        return Record(where, products, calls)

    def find(self, problem: Problem) -> Found | None:
        return self.calls.get(problem) if isinstance(problem, CallProblem) else self.products.get(problem)

    def __str__(self) -> str:
        lines = [TITLE, *(f"{name}: {value}" for name, value in vars(self.where).items())]
        for problem, found in sorted(self.products.items()):
            times = f"    torch: {found.torch:.1f} us", f"    ours: {found.ours:.1f} us with {found.config}"
            lines += ["", str(problem), *times]
        for call, took in sorted(self.calls.items()):
            lines += ["", str(call), f"    torch: {took.torch:.1f} us", f"    candidate: {took.ours:.1f} us"]
        return "\n".join(lines) + "\n"

    def reason_against(self, where: Where) -> Refusal | None:
        """Why it says nothing here; None where it does."""
        for name, value in vars(self.where).items():
            if value != getattr(where, name):
                return Refusal(f"the tuning record was made with {name} {value}, and here it is {getattr(where, name)}")
        return None

    def merged(self, other: Record) -> Record:
        if (refusal := self.reason_against(other.where)) is not None:
            raise InvalidRecord(refusal.reason)
        return replace(self, products={**self.products, **other.products}, calls={**self.calls, **other.calls})


def parsed(text: str) -> Record:
    """The record that a text is; InvalidRecord where it is none."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines or lines[0][1] != TITLE:
        raise InvalidRecord(f"line 1: a record begins with {TITLE!r}")
    head = {name: value for _, line in lines[1:4] for name, _, value in [line.partition(": ")]}
    if set(head) != {"gpu", "triton", "torch"}:
        raise InvalidRecord("line 2: the GPU and the versions of Triton and torch come first")
    products: dict[ProductProblem, Measured] = {}
    calls: dict[CallProblem, CallTimes] = {}
    for (number, first), (_, second), (last, third) in threes(lines[4:]):
        call, torch, candidate = CallProblem.parsed(first), TORCH.fullmatch(second), CANDIDATE.fullmatch(third)
        if call is not None and torch is not None and candidate is not None:
            calls[call] = CallTimes(float(torch[1]), float(candidate[1]))
            continue
        problem, torch, ours = ProductProblem.parsed(first), TORCH.fullmatch(second), OURS.fullmatch(third)
        config = None if ours is None else ProductConfig.parsed(ours[2])
        if problem is None or torch is None or ours is None or config is None:
            raise InvalidRecord(f"lines {number} to {last}: no product with two times and a configuration")
        products[problem] = Measured(float(torch[1]), float(ours[1]), config)
    return Record(Where(**head), products, calls)


Line = tuple[int, str]


def threes(lines: list[Line]) -> Iterable[tuple[Line, Line, Line]]:
    if len(lines) % 3:
        raise InvalidRecord(f"line {lines[-1][0]}: something is missing")
    return zip(lines[::3], lines[1::3], lines[2::3], strict=True)


def configurations(products: Mapping[ProductProblem, Measured]) -> dict[ProductProblem, ProductConfig]:
    """How each product is arranged, and what is left of it when its sums are in pieces."""
    found = {}
    for problem, measured in products.items():
        found[problem.in_pieces(measured.config.pieces)] = replace(measured.config, pieces=1)
    return found | {problem: measured.config for problem, measured in products.items()}
