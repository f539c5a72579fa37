"""Each law of a kernel, broken at least once."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from ferrite.ir.expr import Local
from ferrite.ir.index.algebra import axis, symbol
from ferrite.ir.invalid import InvalidProgram
from ferrite.ir.kernel import laws
from ferrite.ir.kernel.laws import verify_kernel
from ferrite.ir.kernel.nodes import Kernel, Let, Loop, Pointer, State, Store
from ferrite.ir.kernel.parse import parse_kernel
from tests.attention_text import KERNEL as ATTENTION
from tests.loop_kernels import LINEAR_SCAN, changed, text
from tests.triton_kernels import SORTED_ROWS

pytestmark = pytest.mark.quick


SMALL = text("""
    def kernel(x, y, out, n):
        n = symbol(1, 64)
        x = pointer(f32, 'read')
        y = pointer(i64, 'read')
        out = pointer(f32, 'both')
        for i in parallel(n):
            v0: f32 = x[i]
            a: f32 = let(v0)
            tile = scratch(f32, [n])
            with sum(f32) as s:
                for j in reduction(n, lanes=4):
                    v1: f32 = x[j]
                    s.update(v1)
            out[i] = s
""")


def assert_lawful(source, fine, law):
    """Whether a kernel keeps all laws, or breaks this one."""
    if fine:
        verify_kernel(parse_kernel(source))
    else:
        with pytest.raises(InvalidProgram, match=law):
            verify_kernel(parse_kernel(source))


def small(old, new):
    return changed(SMALL, old, new)


def last(new):
    """Another last statement, in the loop over i."""
    return small("out[i] = s", new)


def renamed(old, new):
    return re.sub(rf"\b{old}\b", new, SMALL)


def scan(old, new):
    return changed(LINEAR_SCAN, old, new)


LOOP = "        for j in reduction(n, lanes=4):"
BODY = "v1: f32 = x[j]\n                s.update(v1)"

BROKEN = {
    "a let has the name of a pointer": ("K1", small("a: f32", "x: f32")),
    "a state has the name of an axis": ("K1", renamed("s", "i")),
    "an inner loop has the axis of an outer": ("K1", renamed("j", "i")),
    "a load of what is no memory": ("K2", small("v1: f32 = x[j]", "v1: f32 = z[j]")),
    "a store to what is no memory": ("K2", last("z[i] = s")),
    "a pointer with two coordinates": ("K2", small("v1: f32 = x[j]", "v1: f32 = x[i, j]")),
    "a tile without coordinates": ("K2", last("tile[()] = s")),
    "a tile out of scope": ("K2", SMALL + "    v5: f32 = tile[0]\n    out[0].atomic_add(v5)\n"),
    "a pointer that is only read is written": ("K3", last("x[i] = s")),
    "a pointer that is only written is read": ("K3", small("'read'", "'write'")),
    "a pointer that is only written is added to": ("K3", last("out[i].add(s)").replace("'both'", "'write'")),
    "what is only written is expected to be read": ("K3", last("prefetch(out[i])").replace("'both'", "'write'")),
    "what is no memory is expected to be read": ("K2", last("prefetch(z[i])")),
    "a prefetch reads memory": ("K4", last("v9: i64 = y[i]\n        prefetch(x[data(v9, 8)])")),
    "an extent reads memory": ("K4", small(LOOP, "        v9: i64 = y[i]\n    " + LOOP.replace("n,", "data(v9, 8),"))),
    "a load of another type than the memory": (
        "K5",
        last("v8: f64 = x[i]\n        b: f64 = let(v8)"),
    ),
    "a store of another type than the memory": ("K5", last("out[i] = i64(1)")),
    "operands that differ in type": ("K5", last("v8: f32 = add(s, i64(1))\n        out[i] = v8")),
    "a condition that is no bool": ("K5", last("if s:\n            out[i] = s")),
    "a float as an index": ("K5", last("out[data(a, 8)] = s")),
    "a float as an index of a load": ("K5", last("v8: f32 = x[data(a, 8)]\n        out[i] = v8")),
    "a parameter outside a combine function": ("K5", last("v8: f32 = param(0)\n        out[i] = v8")),
    "a state with too few parts": ("K7", small("sum(f32) as s", "welford(f32) as s")),
    "an argmax whose place is a float": ("K7", small("sum(f32) as s", "argmax(f32, f32) as (s, t)")),
    "a sum of bf16": ("K7", small("sum(f32) as s", "sum(bf16) as q, sum(f32) as s")),
    "a state of bools that is of floats": ("K7", small("sum(f32) as s", "any(f32) as s")),
    "an own state without a function": ("K7", small("sum(f32) as s", "own(f32) as s")),
    "an update of another type": ("K7", small("s.update(v1)", "s.update(i64(1))")),
    "an update of too many": ("K7", small("s.update(v1)", "s.update(v1, v1)")),
    "an update of what is no state": ("K7", small("s.update(v1)", "a.update(v1)")),
    "an update after the block": ("K7", last("s.update(a)")),
    "an update by a second name": ("K7", small("sum(f32) as s", "softmax(f32, f32) as (t, s)")),
    "a state that is read while the order is free": ("K7", small(BODY, BODY + "\n                tile[j] = s")),
    "a combine function that reads memory": ("K7", scan("v0: f32 = param(0)", "v0: f32 = x[0]")),
    "a combine function with too many parameters": ("K7", scan("param(3)", "param(4)")),
    "a combine function that gives another type": ("K7", scan("results(v2, v6)", "results(v2, i64(1))")),
    "lanes in a serial loop": ("K8", small("reduction(n, lanes=4)", "serial(n, lanes=4)")),
    "a block of three lanes": ("K8", small("for i in", "warps = 1\n    for i in").replace("lanes=4", "lanes=3")),
    "a state is updated in a loop inside of a scan": (
        "K7",
        changed(
            small(BODY, "for k in reduction(2):\n                    s.update(a)"), "reduction(n, lanes=4)", "scan(n)"
        ),
    ),
    "a sort of a sum": ("K7", small("reduction(n, lanes=4)", "sort(n, lanes=64)")),
    "a sort of floats": ("K7", small("reduction(n, lanes=4)", "sort(n, lanes=64)").replace("sum(f32)", "amin(f32)")),
    "a sort that no block holds": ("K7", SORTED_ROWS.replace("lanes=16", "lanes=8")),
    "a scan stores at one place for all": ("K9", scan("serial(n)", "scan(n)").replace("out[j] = b", "out[0] = b")),
    "no copies at all": ("K8", small("lanes=4", "copies=0")),
    "an unrolled loop of any length": ("K8", small("reduction(n, lanes=4)", "unrolled(n)")),
    "a parallel loop in a reduction": (
        "K8",
        small(BODY, f"{BODY}\n                for k in parallel(2):\n                    pass"),
    ),
    "a store at one place for all": ("K9", last("out[0] = s")),
    "an addition at one place for all": ("K9", last("out[0].add(s)")),
    "a store at one place of a tile for all lanes": ("K9", small("s.update(v1)", "tile[0] = v1")),
    "an addition where memory says": ("K9", last("v8: i64 = y[i]\n        out[data(v8, 8)].add(s)")),
    "an addition where memory says, by steps too small for the axis": (
        "K9",
        last("v8: i64 = y[i]\n        out[2*data(v8, 8) + i].add(s)"),
    ),
    "a place beyond a tile": ("K10", last("tile[i + 1] = s")),
    "a place before a tile": ("K10", last("tile[i - 1] = s")),
    "problems of a kernel for no GPU": ("K11", small("for i in", "problems = [[8]]\n    for i in")),
    "a problem with too many sizes": ("K11", small("for i in", "warps = 1\n    problems = [[8, 8]]\n    for i in")),
    "resident programs of a kernel for no GPU": ("K13", small("for i in", "resident = 4\n    for i in")),
    "a problem beyond the bounds": ("K11", small("for i in", "warps = 1\n    problems = [[8], [65]]\n    for i in")),
    "attention beside its rows": ("K12", ATTENTION.replace("for m in", "for i in")),
    "a tile of any size": ("K10", SMALL.replace("symbol(1, 64)", "symbol(1, None)")),
}


def built():
    """Kernels that have no text."""
    kernel = parse_kernel(SMALL)
    loop = kernel.body[0]
    store = loop.body[-1]
    f32 = torch.float32

    def with_last(*statements):
        return replace(kernel, body=(replace(loop, body=(*loop.body[:-1], *statements)),))

    accumulate = loop.body[2]
    unknown = replace(accumulate, states=(State("frobnicate", ("s",), (f32,)),))
    yield "K1", replace(kernel, pointers=(*kernel.pointers, Pointer("del", f32)))
    yield "K1", replace(kernel, pointers=(*kernel.pointers, Pointer("x", f32)))
    yield "K4", with_last(replace(store, coordinates=(symbol("m", 1, 2),)))
    yield "K4", with_last(replace(store, coordinates=(axis("k", 2),)))
    yield "K4", replace(kernel, body=(Loop(axis("k", symbol("m", 1, 2)), "serial", ()),))
    yield "K6", with_last(replace(store, value=Local.intern("b", f32)))
    yield "K6", with_last(replace(store, value=Local.intern("s", torch.float64)), store)
    yield "K6", Kernel((Pointer("p", f32, "write"),), (), (Let("b", Local.intern("b", f32)),))
    yield "K7", with_last(unknown, store)
    yield "K6", with_last(Store("out", store.coordinates, Local.intern("i", torch.int64)))


BUILT = list(built())


def test_the_small_kernel_is_valid():
    kernel = parse_kernel(SMALL)
    assert verify_kernel(kernel) is kernel


def test_additions_that_axes_keep_apart_need_not_be_atomic():
    # n is at most 64, so that multiples of 64 are told apart from places in between
    verify_kernel(parse_kernel(last("v8: i64 = y[0]\n        out[64*data(v8, 8) + i].add(s)")))


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_broken_law_is_cited(case):
    law, source = BROKEN[case]
    with pytest.raises(InvalidProgram, match=f"^law {law}: "):
        verify_kernel(parse_kernel(source))


@pytest.mark.parametrize("case", range(len(BUILT)))
def test_a_broken_law_without_text_is_cited(case):
    law, kernel = BUILT[case]
    with pytest.raises(InvalidProgram, match=f"^law {law}: "):
        verify_kernel(kernel)


def test_every_law_is_broken_once():
    numbers = [line.split()[0] for line in laws.__doc__.splitlines() if line.startswith("K")]
    assert numbers == [f"K{count}" for count in range(1, len(numbers) + 1)]
    assert set(numbers) == {law for law, _ in BROKEN.values()} | {law for law, _ in BUILT}


@pytest.mark.parametrize("times", [0, 1])
def test_a_store_at_one_place_for_all_is_right_where_all_are_one_or_none(times):
    kernel = text(f"""
        def kernel(out):
            out = pointer(f32, 'write')
            for i in parallel({times}):
                out[0] = f32(1.0)
    """)
    verify_kernel(parse_kernel(kernel))


@pytest.mark.parametrize(("most", "fine"), [(64, True), (65, False)])
def test_a_store_at_one_place_for_all_is_right_where_there_is_at_most_one(most, fine):
    kernel = text(f"""
        def kernel(out, n):
            n = symbol(0, {most})
            out = pointer(f32, 'write')
            for i in parallel((n + 63) // 64):
                out[0] = f32(1.0)
    """)
    assert_lawful(kernel, fine, "K9")


@pytest.mark.parametrize(
    ("place", "fine"),
    [
        ("40*data(v0, 4) + 5*i + j", True),  # i is told by the remainder of 40, whatever j is
        ("40*data(v0, 4) + 6*i + j", False),  # 6*7 + 4 reaches into the next row
        ("40*data(v0, 4) + 4*i + j", False),  # i + 1 with j is i with j + 4
        ("data(v0, 4) + 20*i + j", True),
        ("data(v0, 4) + 7*i + j", False),
        ("40*j + 4*i + data(v0, 4)", True),  # an index is checked: it stays below the next i
        ("40*j + 3*i + data(v0, 4)", False),
    ],
)
def test_what_is_combined_where_memory_says_is_apart_for_every_thread(place, fine):
    source = text(f"""
        def kernel(at, out):
            at = pointer(i64, 'read')
            out = pointer(f32, 'both')
            for i in parallel(8):
                for j in serial(5):
                    v0: i64 = at[j]
                    out[{place}].add(f32(1.0))
    """)
    assert_lawful(source, fine, "K9")


@pytest.mark.parametrize(
    ("place", "fine"),
    [
        ("n*data(v0, m) + 4096*i + j", True),  # i and j make up a row, and a row is n long
        ("n*data(v0, m) + 4096*i + j + 1", True),
        ("n*data(v0, m) + 4097*i + j", False),  # the last of a row may lie in the next
        ("n*data(v0, m) + 4095*i + j", False),  # the last of a block is the first of the next
    ],
)
def test_what_is_combined_in_rows_of_any_length_is_apart_for_every_thread(place, fine):
    source = text(f"""
        def kernel(at, out, n, m):
            n = symbol(2, None)
            m = symbol(2, None)
            at = pointer(i64, 'read')
            out = pointer(f32, 'both')
            for i in parallel((n + 4095) // 4096):
                for j in vector(min(-4096*i + n, 4096), lanes=4):
                    v0: i64 = at[0]
                    out[{place}].add(f32(1.0))
    """)
    assert_lawful(source, fine, "K9")


START = "min(n - 128*i, max(2 - 128*i, 0))"  # what a part of two columns has in this block


@pytest.mark.parametrize(
    ("length", "place", "fine"),
    [
        (f"min(n - 128*i, 128) - {START}", f"j + {START}", True),
        (f"min(n - 128*i, 128) - {START}", f"j + {START} + 1", False),
        (f"min(n - 128*i, 128) - {START}", f"j + {START} - 1", False),
        (f"min(max(7 - 128*i - {START}, 0), min(n - 128*i, 128) - {START})", f"j + {START}", True),
        ("min(n - 128*i, 128)", f"j + {START}", False),
    ],
)
def test_what_lies_after_another_part_is_inside_of_a_tile(length, place, fine):
    source = text(f"""
        def kernel(out, n):
            n = symbol(7, None)
            out = pointer(f32, 'write')
            for i in parallel((n + 127) // 128):
                tile = scratch(f32, [128])
                for j in serial({length}):
                    tile[{place}] = f32(1.0)
    """)
    assert_lawful(source, fine, "K10")
