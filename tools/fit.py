"""Best polynomials and quotients of polynomials: the exchange algorithm of Remez, with mpmath.

`fit_polynomial` minimises the greatest weighted error of c[0] + c[1] x + ... and gives coefficients that are floats of
the wanted precision: they are rounded one by one, and the rest is fitted again around what was rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mpmath
from mpmath import mp, mpf

mp.dps = 60
Function = Callable[[mpf], mpf]
GRID = 24  # points of the grid per unknown: extrema of the error are found on it
ROUNDS = 30
TRIALS = {24: 6, 53: 2}


@dataclass(frozen=True)
class Fit:
    coefficients: tuple[float, ...]
    denominator: tuple[float, ...]  # (1.0,) of a polynomial
    error: float  # greatest weighted error, with the coefficients as they are


def round_to(value: mpf, digits: int) -> mpf:
    """To a binary float with so many digits: 24 or 53."""
    if value == 0:
        return mpf(0)
    with mp.workprec(digits):
        return +value


def nodes(low: mpf, high: mpf, count: int) -> list[mpf]:
    """Extrema of a Chebyshev polynomial: close together at the ends."""
    middle, half = (low + high) / 2, (high - low) / 2
    return [middle - half * mpmath.cos(mpmath.pi * i / (count - 1)) for i in range(count)]


def _extrema(errors: Sequence[mpf], count: int) -> list[int]:
    """Places of `count` errors that alternate in sign, the greatest error among them."""
    groups: list[int] = []
    for i, error in enumerate(errors):
        if groups and (error > 0) == (errors[groups[-1]] > 0):
            if abs(error) > abs(errors[groups[-1]]):
                groups[-1] = i
        else:
            groups.append(i)
    while len(groups) > count:
        sizes = [abs(errors[i]) for i in groups]
        if len(groups) == count + 1:  # only an end can go
            del groups[0 if sizes[0] < sizes[-1] else -1]
            continue
        # the least goes, with the smaller of its neighbours, so that signs still alternate; at an end it goes alone
        least = sizes.index(min(sizes))
        if 0 < least < len(groups) - 1:
            other = least + 1 if sizes[least + 1] < sizes[least - 1] else least - 1
            del groups[min(least, other) : max(least, other) + 1]
        else:
            del groups[least]
    return groups


class Problem:
    """Values of the target, its weight and the powers of the variable on a fixed grid."""

    def __init__(self, target: Function, weight: Function, low: float, high: float, size: int) -> None:
        self.size = size
        self.grid = nodes(mpf(low), mpf(high), GRID * size)
        self.target = [target(x) for x in self.grid]
        self.weight = [weight(x) for x in self.grid]

    def solve(self, powers: Sequence[int], fixed: Sequence[mpf], under: Sequence[mpf]) -> list[mpf]:
        """Coefficients of `powers` so that (fixed + free) / under is closest; `under` is given."""
        count = len(powers) + 1
        below = [mpmath.polyval(list(reversed(under)), x) for x in self.grid]
        known = [mpmath.polyval(list(reversed(fixed)), x) if fixed else mpf(0) for x in self.grid]
        rest = [t * b - k for t, b, k in zip(self.target, below, known, strict=True)]
        # The lowest free power may change sign at zero; the error alternates once that is divided out.
        scale = [
            w / b * (-1 if x < 0 and powers[0] % 2 else 1)
            for x, w, b in zip(self.grid, self.weight, below, strict=True)
        ]
        chosen = [round(i * (len(self.grid) - 1) / (count - 1)) for i in range(count)]
        best: tuple[mpf, list[mpf]] | None = None
        for _ in range(ROUNDS):
            matrix = mpmath.matrix(count, count)
            right = mpmath.matrix(count, 1)
            for row, i in enumerate(chosen):
                for column, power in enumerate(powers):
                    matrix[row, column] = self.grid[i] ** power
                matrix[row, count - 1] = (-1) ** row / scale[i]
                right[row] = rest[i]
            solution = mpmath.lu_solve(matrix, right)
            answer = [solution[k] for k in range(count - 1)]
            errors = []
            for x, r, s in zip(self.grid, rest, scale, strict=True):
                total = sum((c * x**p for c, p in zip(answer, powers, strict=True)), mpf(0))
                errors.append((r - total) * s)
            level = abs(solution[count - 1])
            worst = max(map(abs, errors))
            if best is None or worst < best[0]:
                best = worst, answer
            found = _extrema(errors, count)
            if len(found) < count or worst <= level * mpf("1.02"):
                break
            chosen = found
        assert best is not None
        return best[1]

    def error(self, above: Sequence[mpf], under: Sequence[mpf]) -> mpf:
        worst = mpf(0)
        for x, t, w in zip(self.grid, self.target, self.weight, strict=True):
            value = mpmath.polyval(list(reversed(above)), x) / mpmath.polyval(list(reversed(under)), x)
            worst = max(worst, abs((t - value) * w))
        return worst


def _rounded(problem: Problem, size: int, digits: int, under: Sequence[mpf], given: Sequence[float]) -> list[mpf]:
    """Coefficients rounded from the lowest power up, each followed by a fit of the others."""
    done = [mpf(value) for value in given]
    while len(done) < size:
        free = problem.solve(range(len(done), size), done, under)
        # late coefficients matter little: what their rounding does is far below one unit
        count = 1 if len(done) < 4 else len(free)
        done += [round_to(value, digits) for value in free[:count]]
    return done


def fit_polynomial(
    target: Function,
    low: float,
    high: float,
    size: int,
    digits: int,
    weight: Function | None = None,
    given: Sequence[float] = (),
) -> Fit:
    """`size` coefficients; `weight` is one over the target unless told; `given` are the lowest ones, if fixed."""
    problem = Problem(target, weight or (lambda x: 1 / target(x)), low, high, size)
    done = _rounded(problem, size, digits, [mpf(1)], given)
    return Fit(tuple(map(float, done)), (1.0,), float(problem.error(done, [mpf(1)])))


def fit_quotient(
    target: Function, low: float, high: float, size: int, under_size: int, digits: int, weight: Function | None = None
) -> Fit:
    """A quotient whose denominator begins with 1. The denominator is rounded first, then the numerator is fitted to it.

    What rounding the denominator costs is chance: of some, fitted on slightly longer intervals, the best is taken.
    """
    weight = weight or (lambda x: 1 / target(x))
    problem = Problem(target, weight, low, high, size + under_size)
    best: Fit | None = None
    for trial in range(TRIALS[digits]):
        longer = Problem(target, weight, low, high * (1 + trial * 0.004), size + under_size)
        under = [round_to(value, digits) for value in _denominator(longer, size, under_size)]
        done = _rounded(problem, size, digits, under, ())
        found = Fit(tuple(map(float, done)), tuple(map(float, under)), float(problem.error(done, under)))
        best = found if best is None or found.error < best.error else best
    assert best is not None
    return best


def _denominator(problem: Problem, size: int, under_size: int) -> list[mpf]:
    """Exchange with both parts free; the level of the error multiplies the denominator of the round before."""
    count = size + under_size
    chosen = [round(i * (len(problem.grid) - 1) / (count - 1)) for i in range(count)]
    under = [mpf(1)] + [mpf(0)] * (under_size - 1)
    for _ in range(2 * ROUNDS):
        matrix = mpmath.matrix(count, count)
        right = mpmath.matrix(count, 1)
        for row, i in enumerate(chosen):
            x, t = problem.grid[i], problem.target[i]
            for power in range(size):
                matrix[row, power] = x**power
            for power in range(1, under_size):
                matrix[row, size + power - 1] = -t * x**power
            matrix[row, count - 1] = (-1) ** row / problem.weight[i] * mpmath.polyval(list(reversed(under)), x)
            right[row] = t
        solution = mpmath.lu_solve(matrix, right)
        above = [solution[k] for k in range(size)]
        under = [mpf(1)] + [solution[size + k] for k in range(under_size - 1)]
        errors = []
        for x, t, w in zip(problem.grid, problem.target, problem.weight, strict=True):
            value = mpmath.polyval(list(reversed(above)), x) / mpmath.polyval(list(reversed(under)), x)
            errors.append((t - value) * w)
        found = _extrema(errors, count)
        if len(found) < count:
            break
        settled = max(map(abs, errors)) <= abs(solution[count - 1]) * mpf("1.02")
        chosen = found
        if settled:
            break
    return under
