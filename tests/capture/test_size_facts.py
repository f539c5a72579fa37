"""What guards say of sizes, and what follows for others."""

from __future__ import annotations

import pytest
import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.functions import FloorDiv

from ferrite.capture import size_facts

s, t, u = sympy.symbols("s t u", integer=True, positive=True)
EQUAL = {FloorDiv(s, t): sympy.Integer(32), sympy.Max(1, FloorDiv(s, t)): FloorDiv(s, t), FloorDiv(s * s, 3): t * u}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (FloorDiv(s, t), 32),
        (FloorDiv(s, t) + 5, 37),
        (sympy.Max(1, FloorDiv(s, t)), 32),  # in two steps
        (FloorDiv(s, 2 * t), 16),
        (FloorDiv(s, 5 * t), 6),
        (FloorDiv(s, t * u), FloorDiv(32, u)),
        (FloorDiv(s, 2 * t * u), FloorDiv(16, u)),
        (FloorDiv(s, 2 * u), FloorDiv(s, 2 * u)),
        (FloorDiv(s, -2 * t), FloorDiv(s, -2 * t)),
        (FloorDiv(u, 2 * t), FloorDiv(u, 2 * t)),
    ],
)
def test_what_guards_hold_equal(given, expected):
    assert size_facts.simplest_equal(given, EQUAL) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [(FloorDiv(8, s) ** 2 * FloorDiv(s * s, 8) ** 2, s**2), (3 * FloorDiv(8, s), 3 * FloorDiv(8, s))],
)
def test_products_that_guards_know_are_found_in_others(given, expected):
    assert size_facts.simplest_equal(given, {FloorDiv(8, s) * FloorDiv(s * s, 8): s}) == expected
