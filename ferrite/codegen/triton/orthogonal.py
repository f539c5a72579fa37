"""Orthogonal polynomials, by their recurrences, as text of Triton helpers.

Each takes a place and a degree, a float of which the whole part counts, and goes on until no lane of the block is below
its degree; lanes that have become NaN wait. Sums are made in 64 bits. Chebyshev's between -1 and 1, where a recurrence
of many steps would lose digits, are those of angles.
"""

from __future__ import annotations

MIN_ANGLE_DEGREE = 8
MAX_HERMITE_DEGREE = 512  # beyond, eager's is NaN
_SIGN = "tl.where((degree & 1) != 0, -1.0, 1.0)"


def _polynomial(name: str, first: str, following: str, known: str, result: str, place: str = "value") -> str:
    """`first`: of degree one; `following`: of the next degree, of `y`, `now`, `before` and `step`; `known`: lanes that
    no recurrence is needed for, which `result` says."""
    return f"""
def {name}(value, count):
    # all of one shape; what is no number may be in either
    y = tl.where(count == count, tl.cast({place}, tl.float64), tl.cast({place}, tl.float64))
    degree = tl.cast(tl.where(value == value, count, count), tl.int64)
    whole = tl.cast(degree, tl.float64)
    known = {known}
    before = y * 0.0 + 1.0
    now = {first}
    step = tl.full([], 1.0, tl.float64)
    waits = known | (whole < 2.0) | (now != now)
    while some_lane(~waits) != 0:
        next = {following}
        before = tl.where(waits, before, now)
        now = tl.where(waits, now, next)
        step = step + 1.0
        waits = waits | (whole <= step) | (now != now)
    found = tl.where(whole < 1.0, 1.0, now)
    found = {result}
    return tl.cast(tl.where(whole < 0.0, 0.0, found), value.dtype)
"""


def _chebyshev(kind: str, first: str, shifted: bool) -> str:
    return _polynomial(
        f"{'shifted_' * shifted}chebyshev_{kind}",
        first,
        "(y + y) * now - before",
        f"(tl.abs(y) <= 1.0) & (whole > {float(MIN_ANGLE_DEGREE)})",
        f"tl.where(known, chebyshev_{kind}_by_angle(y, whole, degree), found)",
        "value + value - 1.0" if shifted else "value",
    )


def _by_angle(kind: str, inside: str, high: str, low: str) -> str:
    """`high` and `low`: at 1, and at -1 but for the sign of odd degrees."""
    return f"""
def chebyshev_{kind}_by_angle(y, whole, degree):
    angle = libdevice.acos(y)
    inside = {inside}
    return tl.where(y == 1.0, {high}, tl.where(y == -1.0, {_SIGN} * {low}, inside))
"""


# The polynomial of degree one, that of an angle, and what it is at the ends.
_KINDS = {
    "t": ("y", "libdevice.cos(whole * angle)", "1.0", "1.0"),
    "u": ("y + y", "libdevice.sin((whole + 1.0) * angle) / libdevice.sin(angle)", "(whole + 1.0)", "(whole + 1.0)"),
    "v": (
        "y + y - 1.0",
        "libdevice.cos((whole + 0.5) * angle) / libdevice.cos(angle * 0.5)",
        "1.0",
        "(whole + whole + 1.0)",
    ),
    "w": (
        "y + y + 1.0",
        "libdevice.sin((whole + 0.5) * angle) / libdevice.sin(angle * 0.5)",
        "(whole + whole + 1.0)",
        "1.0",
    ),
}
ORTHOGONAL_POLYNOMIALS = (
    *(_by_angle(kind, *parts[1:]) for kind, parts in _KINDS.items()),
    *(_chebyshev(kind, parts[0], shifted) for kind, parts in _KINDS.items() for shifted in (False, True)),
    _polynomial(
        "hermite_h",
        "y + y",
        "(y + y) * now - (step + step) * before",
        f"whole > {float(MAX_HERMITE_DEGREE)}",
        'tl.where(known, float("nan"), found)',
    ),
    _polynomial(
        "hermite_he",
        "y",
        "y * now - step * before",
        f"whole > {float(MAX_HERMITE_DEGREE)}",
        'tl.where(known, float("nan"), found)',
    ),
    _polynomial(
        "laguerre_l",
        "1.0 - y",
        "((step + step + 1.0 - y) * now - step * before) / (step + 1.0)",
        "y == 0.0",
        "tl.where(known, 1.0, found)",
    ),
    _polynomial(
        "legendre_p",
        "y",
        "((step + step + 1.0) * y * now - step * before) / (step + 1.0)",
        "tl.abs(y) == 1.0",
        f"tl.where(known, tl.where(y > 0.0, 1.0, {_SIGN}), found)",
    ),
)
# The scalar operators, by the name of their helper.
POLYNOMIAL_OPERATORS = {
    **{f"special_chebyshev_polynomial_{kind}": f"chebyshev_{kind}" for kind in _KINDS},
    **{f"special_shifted_chebyshev_polynomial_{kind}": f"shifted_chebyshev_{kind}" for kind in _KINDS},
    "special_hermite_polynomial_h": "hermite_h",
    "special_hermite_polynomial_he": "hermite_he",
    "special_laguerre_polynomial_l": "laguerre_l",
    "special_legendre_polynomial_p": "legendre_p",
}
