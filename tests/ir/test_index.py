"""Index arithmetic against brute force: every rule, random expressions, bounds."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrite.ir.index.algebra import (
    ONE,
    ZERO,
    Axis,
    FloorDiv,
    Index,
    Max,
    Min,
    Mod,
    Number,
    Product,
    Sum,
    Symbol,
    as_index,
    axis,
    exact,
    maximum,
    minimum,
    never_negative,
    number,
    smallest,
    symbol,
)
from ferrite.ir.index.nested_bounds import never_negative_in_loops
from ferrite.ir.index.strides import may_overlap
from ferrite.ir.index.substitution import evaluate, substitute

pytestmark = pytest.mark.quick

n, m = symbol("n", 1, 4), symbol("m", 1, None)
w = symbol("w", -5, 5)
i, j, k = axis("i", 8), axis("j", 6), axis("k", 4)
a, b, c = axis("a", n), axis("b", m), axis("c", n * m)
VALUES = {n: range(1, 5), m: (1, 2, 3, 7), w: range(-5, 6), i: range(8), j: range(6), k: range(4)}
AXES = (a, b, c)


def assignments(index: Index):
    """Every assignment of the atoms of an expression, of sizes before the axes they bound."""
    atoms = set(index.atoms)
    for atom in index.atoms:
        atoms |= atom.extent.atoms if isinstance(atom, Axis) else set()
    plain = sorted((atom for atom in atoms if atom not in AXES), key=str)
    sized = sorted((atom for atom in atoms if atom in AXES), key=str)
    for values in itertools.product(*(VALUES[atom] for atom in plain)):
        known = dict(zip(plain, values, strict=True))
        ranges = [range(evaluate(atom.extent, known)) for atom in sized]
        for places in itertools.product(*ranges):
            yield {**known, **dict(zip(sized, places, strict=True))}


# --- every rule, by example -------------------------------------------------------------------------------------------

flat = i * 24 + j * 4 + k
# what is written, what it becomes, and what it means
RULES = [
    # sums
    (i + i, "2*i", lambda v: 2 * v[i]),
    (i - i, "0", lambda v: 0),
    (i * 2 + 3 - 3, "2*i", lambda v: 2 * v[i]),
    (j + i, "i + j", lambda v: v[i] + v[j]),
    (-(i - 1), "-i + 1", lambda v: 1 - v[i]),
    (3 - i, "-i + 3", lambda v: 3 - v[i]),
    (i // 3 * 3 + i % 3, "i", lambda v: v[i]),
    (i // 3 * 6 + i % 3 * 2 + j, "2*i + j", lambda v: 2 * v[i] + v[j]),
    ((c // n) * n * m + c % n * m, "c*m", lambda v: v[c] * v[m]),
    ((i // 4) * 4 + (i // 2) % 2 * 2 + i % 2, "i", lambda v: v[i]),
    # products
    (i * 0, "0", lambda v: 0),
    (i * 1, "i", lambda v: v[i]),
    (n * i * m, "i*m*n", lambda v: v[n] * v[i] * v[m]),
    ((i + 1) * (j + 2), "2*i + i*j + j + 2", lambda v: (v[i] + 1) * (v[j] + 2)),
    ((i * 2) * (j * 3), "6*i*j", lambda v: 6 * v[i] * v[j]),
    # whole terms leave a division
    (flat // 4, "6*i + j", lambda v: 6 * v[i] + v[j]),
    (flat // 24, "i", lambda v: v[i]),
    (flat % 24, "4*j + k", lambda v: 4 * v[j] + v[k]),
    (flat // 4 % 6, "j", lambda v: v[j]),
    (flat % 4, "k", lambda v: v[k]),
    ((a * m + b) // m, "a", lambda v: v[a]),
    ((a * m + b) % m, "b", lambda v: v[b]),
    ((a * m * 4 + b * 4 + k) // (m * 4), "a", lambda v: v[a]),
    ((a * m * 4 + b * 4 + k) % (m * 4), "4*b + k", lambda v: 4 * v[b] + v[k]),
    ((a * m * 4 + b * 4 + k) // 4 % m, "b", lambda v: v[b]),
    (i * m // m, "i", lambda v: v[i]),
    ((i * 8 + 16) // 8, "i + 2", lambda v: v[i] + 2),
    ((i * 8 + 19) % 8, "3", lambda v: 3),
    # also where the bottom is a sum, multiplied out
    ((m * n + m) // (n + 1), "m", lambda v: v[m]),
    ((i * (m + 1) + b) // (m + 1), "i", lambda v: v[i]),
    ((i * (m + 1) + b) % (m + 1), "b", lambda v: v[b]),
    ((i * (m + n) * 2 + b) // (m + n), "2*i", lambda v: 2 * v[i]),
    (m // (m + 1), "0", lambda v: 0),
    (m % (m + 1), "m", lambda v: v[m]),
    # a quotient that is the same everywhere
    (i // 8, "0", lambda v: 0),
    (i % 8, "i", lambda v: v[i]),
    ((i + 8) // 8, "1", lambda v: 1),
    ((i + 8) % 8, "i", lambda v: v[i]),
    ((i - 8) // 8, "-1", lambda v: -1),
    (b // m, "0", lambda v: 0),
    (b % m, "b", lambda v: v[b]),
    ((b - m) // m, "-1", lambda v: -1),
    ((b - m) % m, "b", lambda v: v[b]),
    (c // (n * m), "0", lambda v: 0),
    ((m - 1 - b) // m, "0", lambda v: 0),
    # divisions of divisions and remainders
    (i // 2 // 2, "i // 4", lambda v: v[i] // 4),
    (i // 4 // 2, "0", lambda v: 0),
    ((i % 4) // 2, "(i // 2) % 2", lambda v: v[i] % 4 // 2),
    ((w // 2 + w) // 3, "w // 2", lambda v: (v[w] // 2 + v[w]) // 3),
    ((i % 4) % 2, "i % 2", lambda v: v[i] % 2),
    ((i % 4 + 2 * j) % 2, "i % 2", lambda v: v[i] % 2),
    ((c % n) // m, "(c % n) // m", lambda v: v[c] % v[n] // v[m]),
    # what divides both goes
    ((i * 4 + 8) // 12, "(i + 2) // 3", lambda v: (v[i] + 2) // 3),
    ((i * 4 + k) // 8, "i // 2", lambda v: v[i] // 2),
    ((i * 4 + k) % 8, "4*(i % 2) + k", lambda v: 4 * (v[i] % 2) + v[k]),
    ((i * 4 + k + 4) % 8, "4*((i + 1) % 2) + k", lambda v: 4 * ((v[i] + 1) % 2) + v[k]),
    ((i * m + b) // (m * 2), "i // 2", lambda v: v[i] // 2),
    ((i * m + b) % (m * 2), "(i % 2)*m + b", lambda v: v[m] * (v[i] % 2) + v[b]),
    # negative numbers round down, as Python does
    (w // 2, "w // 2", lambda v: v[w] // 2),
    (w % 2, "w % 2", lambda v: v[w] % 2),
    (i // -3, "(-i) // 3", lambda v: v[i] // -3),
    (i % -3, "-((-i) % 3)", lambda v: v[i] % -3),
    (-(i // 3), "-(i // 3)", lambda v: -(v[i] // 3)),
    # trivial
    (i // 1, "i", lambda v: v[i]),
    (i % 1, "0", lambda v: 0),
    (n // n, "1", lambda v: 1),
    (n % n, "0", lambda v: 0),
    (ZERO // m, "0", lambda v: 0),
    (ZERO % m, "0", lambda v: 0),
    # choices
    (minimum(i, 9), "i", lambda v: v[i]),
    (minimum(i, 3), "min(3, i)", lambda v: min(v[i], 3)),
    (maximum(i, -1), "i", lambda v: v[i]),
    (maximum(w, 0), "max(0, w)", lambda v: max(v[w], 0)),
    (minimum(m, m + 1), "m", lambda v: v[m]),
    (maximum(b, m), "m", lambda v: v[m]),
    (minimum(minimum(i, j), 3), "min(3, i, j)", lambda v: min(v[i], v[j], 3)),
    (maximum(maximum(w, n), 2), "max(2, n, w)", lambda v: max(v[w], v[n], 2)),
    (minimum(i, i), "i", lambda v: v[i]),
    (minimum(w, 3) * 2 + 1, "2*min(3, w) + 1", lambda v: 2 * min(v[w], 3) + 1),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(RULES)), ids=lambda case: str(RULES[case][1]))
def test_a_rule(case):
    made, text, meaning = RULES[case]
    assert str(made) == text
    assert all(evaluate(made, values) == meaning(values) for values in all_values())


def all_values():
    """Assignments of every atom: enough of each, not all of all."""
    for number_, (size, other) in enumerate(itertools.product(VALUES[n], VALUES[m])):
        for step in range(30):
            at = number_ + step
            yield {
                n: size, m: other, w: at % 11 - 5, i: at % 8, j: at * 5 % 6, k: at * 7 % 4,
                a: at % size, b: at * 3 % other, c: at * 11 % (size * other),
            }  # fmt: skip


def test_dividing_by_zero_is_an_error():
    with pytest.raises(ZeroDivisionError):
        i // 0
    with pytest.raises(ZeroDivisionError):
        i % 0


# --- random expressions -----------------------------------------------------------------------------------------------

ATOMS = [n, m, w, i, j, k, a, b, c]
DIVISORS = [as_index(value) for value in (2, 3, 4, 6, 8, 12)] + [n, m, n * 2, n * m, m * 4, m + 1]
FACTORS = [as_index(value) for value in (1, 2, 3, 4, -1, -2)] + [n, m, m + 1]


@st.composite
def expressions(draw, depth=5):
    """An expression, and the same as a function that computes it without any rule."""
    kind = draw(st.sampled_from("a#" if depth == 0 else "a+-*//%%<>"))
    if kind == "a":
        atom = draw(st.sampled_from(ATOMS))
        return atom, lambda values: values[atom]
    if kind == "#":
        value = draw(st.integers(-6, 12))
        return number(value), lambda values: value
    one, first = draw(expressions(depth - 1))
    if kind in "/%":
        divisor = draw(st.sampled_from(DIVISORS))
        if kind == "/":
            return one // divisor, lambda values: first(values) // evaluate(divisor, values)
        return one % divisor, lambda values: first(values) % evaluate(divisor, values)
    if kind == "*":
        factor = draw(st.sampled_from(FACTORS))
        return one * factor, lambda values: first(values) * evaluate(factor, values)
    other, second = draw(expressions(depth - 1))
    if kind == "+":
        return one + other, lambda values: first(values) + second(values)
    if kind == "-":
        return one - other, lambda values: first(values) - second(values)
    if kind == "<":
        return minimum(one, other), lambda values: min(first(values), second(values))
    return maximum(one, other), lambda values: max(first(values), second(values))


@st.composite
def assignment(draw):
    values = {atom: draw(st.sampled_from(list(range_))) for atom, range_ in VALUES.items()}
    for atom in AXES:
        values[atom] = draw(st.integers(0, evaluate(atom.extent, values) - 1))
    return values


@given(expressions(), st.lists(assignment(), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_simplifying_keeps_the_value(pair, many):
    made, meaning = pair
    for values in many:
        assert evaluate(made, values) == meaning(values)


@given(expressions(), st.lists(assignment(), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_bounds_hold(pair, many):
    made, _ = pair
    for values in many:
        value = evaluate(made, values)
        assert made.low is None or made.low <= value
        assert made.high is None or value <= made.high
        assert not never_negative(made) or value >= 0
        assert not never_negative_in_loops(made) or value >= 0
        assert evaluate(smallest(made), values) <= value


@given(expressions())
@settings(max_examples=60, deadline=None)
@pytest.mark.lengthy
def test_simplifying_again_changes_nothing(pair):
    made, _ = pair
    assert substitute(made, lambda atom: atom) is made


@given(expressions(), expressions())
@settings(max_examples=40, deadline=None)
def test_the_order_of_making_does_not_matter(one, other):
    left, right = one[0], other[0]
    assert left + right is right + left
    assert left - right is -(right - left)
    assert minimum(left, right) is minimum(right, left)
    assert maximum(left, right) is maximum(right, left)


@given(expressions(3), expressions(3), assignment())
@settings(max_examples=40, deadline=None)
def test_putting_in_is_evaluating(outer, inner, values):
    """An expression in place of an atom means its value there."""
    made, replaced = outer[0], inner[0]
    changed = substitute(made, {w: replaced})
    assert evaluate(changed, values) == evaluate(made, {**values, w: evaluate(replaced, values)})


@given(expressions(3), st.sampled_from(DIVISORS), assignment())
@settings(max_examples=40, deadline=None)
def test_what_divides_exactly_does(pair, divisor, values):
    made, _ = pair
    quotient = exact(made * divisor, divisor)
    assert quotient is not None or not isinstance(divisor, Number)  # of symbols not all is seen
    if quotient is not None:
        assert evaluate(quotient * divisor, values) == evaluate(made * divisor, values)


def test_small_expressions_are_checked_everywhere():
    """No sampling: every expression of two operations over two atoms, at every point."""
    parts = [k, b, number(3)]
    ways = [
        (lambda x, y: x + y), (lambda x, y: x - y), (lambda x, y: x * y), (lambda x, _: x // 3), (lambda x, _: x % 3),
        (lambda x, _: x // m), (lambda x, _: x % m), (lambda x, y: minimum(x, y)),
    ]  # fmt: skip
    plain = [
        (lambda x, y, _: x + y), (lambda x, y, _: x - y), (lambda x, y, _: x * y), (lambda x, _, __: x // 3),
        (lambda x, _, __: x % 3), (lambda x, _, s: x // s), (lambda x, _, s: x % s), (lambda x, y, _: min(x, y)),
    ]  # fmt: skip
    for x, y, z in itertools.product(parts, repeat=3):
        for (first, meant), (second, meant_too) in itertools.product(zip(ways, plain, strict=True), repeat=2):
            made = second(first(x, y), z)
            for values in assignments(x + y * 2 + z * 4 + m):
                numbers = [evaluate(part, values) for part in (x, y, z)]
                size = values[m]
                assert evaluate(made, values) == meant_too(meant(numbers[0], numbers[1], size), numbers[2], size)


# --- nodes ------------------------------------------------------------------------------------------------------------


def test_equal_expressions_are_one_object():
    assert i * 6 + j is (j + 6 * i)
    assert axis("i", 8) is i
    assert symbol("n", 1, 4) is n
    assert symbol("n", 1, 5) is not n
    assert number(3) is as_index(3)


def test_every_kind_is_made():
    kinds = {type(item) for item in (ZERO, n, i, i + 1, i * n, w // 2, w % 2, minimum(w, 2), maximum(w, 2))}
    assert kinds == {Number, Symbol, Axis, Sum, Product, FloorDiv, Mod, Min, Max}


def test_expressions_cannot_be_changed():
    with pytest.raises(AttributeError, match="cannot be changed"):
        i.name = "j"


def test_expressions_survive_copying_and_pickling():
    made = minimum((i * 24 + j * n + w) // m % 7, w * 3)
    assert copy.deepcopy(made) is made
    assert pickle.loads(pickle.dumps(made)) is made


def test_atoms_are_all_that_it_depends_on():
    assert (i * n + w // 2).atoms == {i, n, w}
    assert (i - i).atoms == frozenset()


def test_arrays_are_evaluated_at_once():
    made = minimum(i * 6 + j, 40) // 4 + maximum(w, 0) % 3
    values = {i: torch.arange(8).view(8, 1), j: torch.arange(6), w: torch.tensor(-2)}
    expected = torch.minimum(values[i] * 6 + values[j], torch.tensor(40)) // 4
    assert torch.equal(evaluate(made, values), expected)


def test_putting_in_simplifies():
    assert substitute(i // 4, {i: k * 4}) is k
    assert substitute(i + j, {i: j, j: i}) is i + j
    assert substitute(i, {j: k}) is i


def test_large_products_are_not_multiplied_out():
    wide = ONE
    for place in range(12):
        wide = wide * (symbol(f"x{place}", 1, None) + 1)
    assert len(wide.text) < 30_000
    values = {symbol(f"x{place}", 1, None): place + 1 for place in range(12)}
    total = 1
    for place in range(12):
        total *= place + 2
    assert evaluate(wide, values) == total


@pytest.mark.slow
@given(expressions(6), st.lists(assignment(), min_size=4, max_size=8))
@settings(max_examples=5000, deadline=None)
def test_large_expressions_keep_value_and_form(pair, many):
    made, meaning = pair
    assert substitute(made, lambda atom: atom) is made
    for values in many:
        value = evaluate(made, values)
        assert value == meaning(values)
        assert made.low is None or made.low <= value
        assert made.high is None or value <= made.high


def places(dims):
    return [sum(at * stride for at, (_, stride) in zip(point, dims, strict=True)) for point in points(dims)]


def points(dims):
    return itertools.product(*(range(size) for size, _ in dims))


@pytest.mark.quick
def test_elements_that_are_said_to_be_apart_are():
    apart = 0
    for dims in itertools.product(itertools.product((1, 2, 3), (1, 2, 3, 4, 6)), repeat=3):
        if not may_overlap(dims):
            apart += 1
            assert len(set(places(dims))) == len(places(dims)), dims
    assert apart > 500
    assert not may_overlap([(3, 1), (2, 3)])
    assert may_overlap([(3, 1), (2, 2)])
    assert not may_overlap([(3, 0), (2, 1)]), "what a stride of 0 repeats is one element"
