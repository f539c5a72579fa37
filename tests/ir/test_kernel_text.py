"""Kernels as text that is read back, and by position, so that equal kernels are equal."""

from __future__ import annotations

import re

import pytest

from ferrite.ir.kernel.canonical import canonical
from ferrite.ir.kernel.laws import verify_kernel
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.ir.program.parse import BadText
from tests.loop_kernels import KERNELS, LINEAR_SCAN, SCATTER_ADD, SOFTMAX, changed

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", list(KERNELS))
def test_a_kernel_is_read_back(name):
    kernel = parse_kernel(KERNELS[name])
    assert str(kernel) == KERNELS[name]
    assert parse_kernel(str(kernel)) == kernel
    assert hash(parse_kernel(str(kernel))) == hash(kernel)


def test_an_empty_kernel_is_read_back():
    kernel = parse_kernel("def kernel():\n    pass\n")
    assert str(kernel) == "def kernel():\n    pass\n"


def wrong(old, new, source=SOFTMAX):
    return changed(source, old, new)


WRONG = {
    "another order of arguments": (wrong("kernel(x, out,", "kernel(out, x,"), 1, "x, out, rows, n"),
    "an access nobody knows": (wrong("'read'", "'raed'"), 4, "read, write, both"),
    "a bound that is no number": (wrong("symbol(1, None)", "symbol('a', None)"), 2, "a number or None"),
    "a loop nobody knows": (wrong("parallel(", "paralel("), 6, "serial, parallel"),
    "lanes that are no number": (wrong("lanes=4", "lanes=n"), 9, "a number"),
    "a state nobody knows": (wrong("amax(f32)", "most(f32)"), 8, "argmax"),
    "a state without a name": (wrong("amax(f32) as most", "amax(f32)"), 8, "as name"),
    "names for another number of types": (wrong("amax(f32)", "amax(f32, f32)"), 8, "1 names for 2 types"),
    "a let of another type": (wrong("e: f32 =", "e: f64 ="), 17, "another type"),
    "a value of the statement before": (wrong("row[j] = e", "row[j] = v3"), 18, "'v3'"),
    "an axis outside its loop": (wrong("row = scratch(f32, [n])", "row = scratch(f32, [j])"), 7, "'j'"),
    "a statement of another kind": (wrong("row = scratch(f32, [n])", "import os"), 7, "a loop"),
    "a mode nobody knows": (wrong("atomic_add", "atomic_sub", SCATTER_ADD), 11, "a store"),
    "a combine function of no state": (wrong("combine(a)", "combine(b)", LINEAR_SCAN), 7, "no state 'b'"),
    "a combine function without results": (
        wrong("results(v2, v6)", "a.update(v2, v6)", LINEAR_SCAN),
        15,
        "results(...)",
    ),
    "a combine function with a store": (wrong("v2: f32 = mul(v0, v1)", "out[0] = v1", LINEAR_SCAN), 10, "a value"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_wrong_text_is_explained(case):
    source, line, words = WRONG[case]
    with pytest.raises(BadText) as caught:
        parse_kernel(source)
    assert caught.value.line == line
    assert words in str(caught.value)


@pytest.mark.parametrize("name", list(KERNELS))
def test_canonical_kernels_are_valid_and_stay(name):
    kernel = parse_kernel(KERNELS[name])
    made = verify_kernel(canonical(kernel))
    assert canonical(made) == made
    assert parse_kernel(str(made)) == made


def renamed(source, names):
    for old, new in names.items():
        source = re.sub(rf"\b{old}\b", new, source)
    return source


def test_equal_kernels_become_equal():
    names = {
        "rows": "zz",
        "row": "a1",
        "most": "v0",
        "total": "b_",
        "i": "p0",
        "out": "i0",
        "x": "s0",
        "n": "x",
        "j": "y",
    }
    one, two = parse_kernel(SOFTMAX), parse_kernel(renamed(SOFTMAX, names))
    assert one != two
    assert canonical(one) == canonical(two)
    assert canonical(one) != canonical(parse_kernel(SOFTMAX.replace("copies=4", "copies=2")))
