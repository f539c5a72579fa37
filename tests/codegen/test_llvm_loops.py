"""Loops, places in memory, states and masks as machine code, for extents that do and do not fit the lanes."""

from __future__ import annotations

import pytest
import torch

from ferrite.codegen.llvm.emit import kernel_text
from ferrite.codegen.llvm.processor import host_processor
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.ir.states import STATES
from ferrite.ir.types import short
from tests.llvm_kernels import assert_close, assert_same, fenced, native
from tests.loop_kernels import text

EXTENTS = (0, 1, 2, 3, 4, 7, 8, 13, 35)


def llvm(source):
    return kernel_text(parse_kernel(source), host_processor(), "kernel")


def filled(dtype, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, [count], generator=generator).bool()
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(-50, 50, [count], generator=generator).to(dtype)


def empty(dtype, count):
    return torch.zeros(count, dtype=dtype)


# --- places -----------------------------------------------------------------------------------------------------------

PLACES = {
    "row": "i",
    "back": "n - 1 - i",
    "every second": "2*i",
    "one": "3",
    "by a size": "i*s",
    "division": "i // 3",
    "division by lanes": "i // 8",
    "remainder": "i % 5",
    "remainder of lanes": "i % 8",
    "less than zero": "(i - 5) // 4 + 9",
    "remainder below zero": "(2 - i) % 6",
    "clamped": "max(min(i - 2, 9), 0)",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("lanes", "copies"), [(1, 1), (4, 1), (4, 3), (1, 3)])
def test_elements_are_found_where_they_lie(place, lanes, copies):
    source = text(f"""
        def kernel(x, out, n, s):
            n = symbol(0, 1000)
            s = symbol(1, 10)
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            for i in vector(n, lanes={lanes}, copies={copies}):
                v0: f32 = x[{PLACES[place]}]
                v1: f32 = mul(v0, f32(2.0))
                out[i] = v1
    """)
    for extent in EXTENTS:
        assert_same(source, [filled(torch.float32, 120), empty(torch.float32, extent)], [extent, 3])
        if place in ("row", "back"):
            for at_end in (False, True):
                memory = [fenced(filled(torch.float32, extent), at_end), fenced(empty(torch.float32, extent), at_end)]
                assert native(source)(memory, [extent, 3])[0] == 0
    if place in ("row", "back", "remainder of lanes") and lanes > 1:
        assert "load <4 x float>" in llvm(source)
    if place in ("one", "division by lanes") and (lanes, copies) == (4, 1):
        assert llvm(source).count("load float") <= 5  # the tail alone goes lane by lane


@pytest.mark.parametrize("place", ["i", "n - 1 - i", "3*i", "i*s"])
def test_elements_are_written_where_they_lie(place):
    source = text(f"""
        def kernel(x, out, n, s):
            n = symbol(0, 1000)
            s = symbol(1, 10)
            x = pointer(i16, 'read')
            out = pointer(i16, 'both')
            for i in vector(n, lanes=4, copies=2):
                v0: i16 = x[i]
                e: i16 = let(v0)
                out[{place}] = e
                out[{place}].add(e)
    """)
    for extent in EXTENTS:
        assert_same(source, [filled(torch.int16, extent), empty(torch.int16, 120)], [extent, 3])


@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize(("lanes", "copies"), [(1, 1), (4, 1), (4, 2), (8, 2)])
def test_a_known_extent_has_whole_vectors_and_a_rest(extent, lanes, copies):
    source = text(f"""
        def kernel(x, out, total):
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            total = pointer(f32, 'write')
            with sum(f32) as s:
                for i in reduction({extent}, lanes={lanes}, copies={copies}):
                    v0: f32 = x[i]
                    e: f32 = let(v0)
                    out[i] = e
                    s.update(e)
            total[0] = s
    """)
    x = torch.arange(extent).float()  # sums of these are exact
    assert_same(source, [x, empty(torch.float32, extent), empty(torch.float32, 1)])


def test_loops_stand_in_one_another():
    source = text("""
        def kernel(x, out, m, n):
            m = symbol(0, 100)
            n = symbol(0, 100)
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            for a in parallel(m):
                for b in parallel(3):
                    for c in unrolled(2):
                        for d in serial(a + 1):
                            for i in vector(n, lanes=4, copies=2):
                                v0: f32 = x[i]
                                v1: f32 = index(a + 10*b + 100*c + d)
                                v2: f32 = add(v0, v1)
                                out[6*a*n + 2*b*n + c*n + i] = v2
    """)
    for m, n in ((0, 5), (1, 0), (3, 7)):
        for threads in (1, 2):
            assert_same(source, [filled(torch.float32, n), empty(torch.float32, 6 * m * n)], [m, n], threads)


def test_extents_may_depend_on_a_vector_axis():
    source = text("""
        def kernel(x, out, n):
            n = symbol(0, 100)
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            for i in vector(n, lanes=4):
                with sum(f32) as s:
                    for j in reduction(i + 1, lanes=4):
                        v0: f32 = x[j]
                        s.update(v0)
                out[i] = s
    """)
    assert_same(source, [torch.arange(9).float(), empty(torch.float32, 9)], [9])


def test_invariants_are_loaded_once_and_never_from_a_loop_that_does_not_run():
    source = text("""
        def kernel(x, w, out, n):
            n = symbol(0, 100)
            x = pointer(f32, 'read')
            w = pointer(f32, 'read')
            out = pointer(f32, 'write')
            for a in serial(4):
                for i in serial(n):
                    v0: f32 = x[i]
                    v1: f32 = w[a]
                    v2: f32 = mul(v0, v1)
                    out[a*n + i] = v2
    """)
    inner = llvm(source).rsplit("= phi", 1)[1].split("br i1")[0]
    assert inner.count("load float") == 1  # x; w is loaded before the inner loop
    assert_same(source, [filled(torch.float32, 5), filled(torch.float32, 4), empty(torch.float32, 20)], [5])
    # with nothing to do nothing is read: these addresses are no memory
    assert native(source)([torch.empty(0)] * 3, [0]) == (0, (0, 0))


def test_what_is_stored_is_read_again():
    source = text("""
        def kernel(x, n):
            n = symbol(0, 100)
            x = pointer(f32, 'both')
            for i in vector(n, lanes=4, copies=2):
                v0: f32 = x[i]
                v1: f32 = add(v0, f32(1.0))
                x[i] = v1
                v2: f32 = x[i]
                v3: f32 = mul(v2, v2)
                x[i] = v3
            for i in serial(n):
                v4: f32 = x[0]
                v5: f32 = x[i]
                v6: f32 = add(v4, v5)
                x[i] = v6
    """)
    for extent in EXTENTS:
        assert_same(source, [filled(torch.float32, extent)], [extent])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.bool], ids=short)
@pytest.mark.parametrize("lanes", [2, 4, 8])
def test_squares_are_turned_while_they_are_stored(dtype, lanes):
    source = text(f"""
        def kernel(x, out, n, m):
            n = symbol(0, 100)
            m = symbol(0, 100)
            x = pointer({short(dtype)}, 'read')
            out = pointer({short(dtype)}, 'write')
            for a in vector(n, copies={lanes}):
                for b in vector(m, lanes={lanes}):
                    v0: {short(dtype)} = x[a*m + b]
                    out[b*100 + a] = v0
    """)
    for rows, columns in ((16, 16), (9, 13), (3, 40), (40, 1)):
        assert_same(source, [filled(dtype, rows * columns), empty(dtype, 100 * columns)], [rows, columns])
    assert "shufflevector" in llvm(source)


# --- scratch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 40000])
def test_scratch_is_on_the_stack_or_in_memory_of_its_own(width):
    source = text(f"""
        def kernel(x, out, n):
            n = symbol(0, {width})
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            for a in parallel(3):
                tile = scratch(f32, [2, n])
                for i in vector(n, lanes=4):
                    v0: f32 = x[i]
                    tile[a % 2, i] = v0
                for i in vector(n, lanes=4):
                    v1: f32 = tile[a % 2, n - 1 - i]
                    out[a*n + i] = v1
    """)
    for threads in (1, 2):
        assert_same(source, [filled(torch.float32, 7), empty(torch.float32, 21)], [7], threads)
    assert ("@malloc(i64" in llvm(source).replace("declare noalias ptr @malloc(i64)", "")) == (width == 40000)


def test_scratch_in_a_vector_loop_belongs_to_one_iteration():
    source = text("""
        def kernel(x, out, n):
            n = symbol(0, 100)
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            for i in vector(n, lanes=4):
                tile = scratch(f32, [3])
                for j in serial(3):
                    v0: f32 = x[3*i + j]
                    tile[2 - j] = v0
                for j in serial(3):
                    v1: f32 = tile[j]
                    out[3*i + j] = v1
    """)
    assert_same(source, [filled(torch.float32, 15), empty(torch.float32, 15)], [5])


# --- states -----------------------------------------------------------------------------------------------------------

STATE_TYPES = {
    "any": torch.bool,
    "all": torch.bool,
    "xor": torch.int32,
}


@pytest.mark.parametrize(("lanes", "copies"), [(1, 1), (1, 4), (4, 1), (4, 4)])
@pytest.mark.parametrize("kind", STATES)
def test_states_are_combined_over_lanes_and_copies(kind, lanes, copies):
    row, dtype = STATES[kind], STATE_TYPES.get(kind, torch.float32)
    types = [dtype, torch.int64] if row.takes == 2 else [dtype] * row.gives
    names = [f"r{place}" for place in range(row.gives)]
    outs = [f"o{place}" for place in range(row.gives)]
    bound = names[0] if len(names) == 1 else f"({', '.join(names)})"
    lines = [
        f"def kernel(x, {', '.join(outs)}, n):",
        "    n = symbol(0, None)",
        f"    x = pointer({short(dtype)}, 'read')",
        *(f"    {out} = pointer({short(one)}, 'write')" for out, one in zip(outs, types, strict=True)),
        f"    with {kind}({', '.join(map(short, types))}) as {bound}:",
        f"        for j in reduction(n, lanes={lanes}, copies={copies}):",
        f"            v0: {short(dtype)} = x[j]",
        *(["            v1: i64 = index(j)"] if row.takes == 2 else []),
        f"            r0.update({'v0, v1' if row.takes == 2 else 'v0'})",
        *(f"    {out}[0] = {name}" for out, name in zip(outs, names, strict=True)),
    ]
    for extent in (0, 1, 3, 22, 35):
        memory = [filled(dtype, extent), *(empty(one, 1) for one in types)]
        assert_close("\n".join(lines) + "\n", memory, [extent], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("lanes", "copies"), [(1, 1), (4, 1), (4, 2)])
def test_an_own_state_has_no_identity(lanes, copies):
    """Joining is done with what is there: a product of minima has no neutral element."""
    source = text(f"""
        def kernel(x, out, n):
            n = symbol(1, None)
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            with own(f32, f32) as (a, b):
                with combine(a):
                    v0: f32 = param(0)
                    v1: f32 = param(2)
                    v2: f32 = minimum(v0, v1)
                    v3: f32 = param(1)
                    v4: f32 = param(3)
                    v5: f32 = maximum(v3, v4)
                    results(v2, v5)
                for j in reduction(n, lanes={lanes}, copies={copies}):
                    v6: f32 = x[j]
                    a.update(v6, v6)
            out[0] = a
            out[1] = b
    """)
    for extent in (1, 2, 3, 22):
        assert_same(source, [filled(torch.float32, extent) - 9, empty(torch.float32, 2)], [extent])


def test_a_state_of_every_lane_may_be_read_as_it_grows():
    source = text("""
        def kernel(x, out, m, n):
            m = symbol(0, 100)
            n = symbol(0, 100)
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            for i in vector(n, lanes=4, copies=2):
                with sum(f32) as s:
                    for j in serial(m):
                        v0: f32 = x[j*n + i]
                        s.update(v0)
                        out[j*n + i] = s
    """)
    for extent in EXTENTS:
        x = torch.arange(5 * extent).float()
        assert_same(source, [x, empty(torch.float32, 5 * extent)], [5, extent])


def test_a_state_that_is_read_as_it_grows_is_in_one_place():
    source = text("""
        def kernel(x, out):
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            with sum(f32) as s:
                for j in serial(3):
                    for i in reduction(8, lanes=4):
                        v0: f32 = x[8*j + i]
                        s.update(v0)
                    out[j] = s
    """)
    with pytest.raises(ValueError, match="s is read in its block"):
        llvm(source)


def test_only_what_counts_updates_a_state():
    source = text("""
        def kernel(x, out, n):
            n = symbol(0, 100)
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            with sum(f32) as s, amax(f32) as m:
                for i in reduction(n, lanes=4, copies=2):
                    v0: f32 = x[i]
                    v1: b8 = lt(v0, f32(0.0))
                    if v1:
                        v2: f32 = x[i]
                        e: f32 = let(v2)
                        v3: f32 = mul(e, e)
                        s.update(v3)
                        m.update(e)
            out[0] = s
            out[1] = m
    """)
    for extent in EXTENTS:
        assert_close(source, [filled(torch.float32, extent), empty(torch.float32, 2)], [extent], rtol=1e-5, atol=1e-6)


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["i - 2", "2*i - 3", "7 - i", "3"])
@pytest.mark.parametrize(("lanes", "copies"), [(1, 1), (4, 1), (4, 2), (1, 2)])
def test_nothing_outside_is_read(place, lanes, copies):
    source = text(f"""
        def kernel(x, out, n, m):
            n = symbol(0, 100)
            m = symbol(0, 100)
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            for i in vector(n, lanes={lanes}, copies={copies}):
                v0: i64 = index({place})
                v1: b8 = ge(v0, i64(0))
                v2: i64 = index(m)
                v3: b8 = lt(v0, v2)
                v4: b8 = logical_and(v1, v3)
                v5: f32 = x[{place}]
                v6: f32 = exp(v5)
                v7: f32 = masked(v4, v6, f32(-1.0))
                out[i] = v7
    """)
    for extent in EXTENTS:
        for inside in (0, 1, 6):
            x = filled(torch.float32, inside)
            assert_close(source, [x, empty(torch.float32, extent)], [extent, inside])
            for at_end in (False, True):
                assert native(source)([fenced(x, at_end), empty(torch.float32, extent)], [extent, inside])[0] == 0


def test_indices_of_one_place_are_checked_in_the_order_of_their_text():
    """Not in that of a set, which differs from process to process: the same kernel is the same code, and says the same
    where several are wrong."""
    places = range(8)
    head = [f"def kernel(x, out, {', '.join(f'w{place}' for place in places)}):"]
    head += ["    x = pointer(f32, 'read')", "    out = pointer(f32, 'write')"]
    head += [f"    w{place} = pointer(i64, 'read')" for place in places]
    body = ["    for i in serial(9):", *(f"        v{place}: i64 = w{place}[i]" for place in places)]
    body += [f"        v8: f32 = x[{' + '.join(f'data(v{place}, 5)' for place in places)}]", "        out[i] = v8", ""]
    source = "\n".join(head + body)
    memory = [torch.zeros(99), torch.zeros(9), *(torch.full((9,), 5 + place) for place in places)]
    assert native(source)(memory) == (1, (5, 5))  # the first of them, which is 5 where 4 is the last place


def test_conditions_guard_stores_of_lanes():
    source = text("""
        def kernel(x, out, where, n):
            n = symbol(0, 100)
            x = pointer(f32, 'read')
            out = pointer(f32, 'both')
            where = pointer(i64, 'read')
            for i in vector(n, lanes=4, copies=2):
                v0: f32 = x[i]
                v1: b8 = gt(v0, f32(0.0))
                if v1:
                    v2: f32 = x[i]
                    e: f32 = let(v2)
                    v3: f32 = neg(e)
                    out[i] = v3
                    v4: i64 = where[i]
                    out[data(v4, n) + n] = e
                    v5: b8 = gt(e, f32(1.0))
                    if v5:
                        out[i].add(f32(100.0))
                v6: i64 = index(n)
                v7: b8 = gt(v6, i64(3))
                if v7:
                    out[i + 2*n] = f32(5.0)
    """)
    for extent in EXTENTS:
        where = torch.arange(extent).flip(0)
        assert_same(source, [filled(torch.float32, extent), empty(torch.float32, 3 * extent), where], [extent])
    # an index that does not count is not checked; one that does is
    x, where = torch.tensor([-1.0, 1.0, -1.0, 1.0, 1.0]), torch.tensor([99, 1, -7, 2, 3])
    assert native(source)([x, empty(torch.float32, 15), where], [5])[0] == 0
    where[4] = 5
    assert native(source)([x, empty(torch.float32, 15), where], [5]) == (1, (5, 5))


def test_a_masked_division_by_zero_does_not_count():
    source = text("""
        def kernel(x, y, out, n):
            n = symbol(0, 100)
            x = pointer(i32, 'read')
            y = pointer(i32, 'read')
            out = pointer(i32, 'write')
            for i in vector(n, lanes=4):
                v0: i32 = y[i]
                v1: b8 = ne(v0, i32(0))
                v2: i32 = x[i]
                v3: i32 = floor_divide(v2, v0)
                v4: i32 = masked(v1, v3, i32(-1))
                out[i] = v4
    """)
    x, y = filled(torch.int32, 13), filled(torch.int32, 13, 1)
    y[5] = y[12] = 0
    assert_same(source, [x, y, empty(torch.int32, 13)], [13])


# --- other threads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", ["add", "mul", "amax", "amin"])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool],
    ids=short,
)
def test_threads_may_meet_at_an_element(dtype, mode, threads):
    name = short(dtype)
    source = text(f"""
        def kernel(x, where, out, n):
            n = symbol(0, 10000)
            x = pointer({name}, 'read')
            where = pointer(i32, 'read')
            out = pointer({name}, 'both')
            for a in parallel(7):
                for i in vector(n, lanes=4, copies=2):
                    v0: i32 = where[a*n + i]
                    v1: {name} = x[a*n + i]
                    out[data(v0, 3)].atomic_{mode}(v1)
    """)
    n = 13
    small = torch.randint(1, 3, [7 * n], generator=torch.Generator().manual_seed(0)).to(dtype)  # exact in any order
    if mode == "mul":
        small[8:] = 1
    if mode == "add" and dtype.is_floating_point:
        small[64:] = 0
    where = (torch.arange(7 * n) % 3).to(torch.int32)
    assert_same(source, [small, where, torch.ones(3, dtype=dtype)], [n], threads)


def test_a_parallel_loop_around_which_others_stand_gets_what_it_needs():
    source = text("""
        def kernel(x, out, n):
            n = symbol(0, 100)
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            v0: f32 = x[0]
            first: f32 = let(v0)
            with sum(f32) as s:
                for i in reduction(n, lanes=4):
                    v1: f32 = x[i]
                    s.update(v1)
            for a in serial(3):
                tile = scratch(f32, [4])
                for b in parallel(4):
                    v2: f32 = index(a)
                    v3: f32 = add(first, v2)
                    tile[b] = v3
                for b in parallel(4):
                    v4: f32 = tile[3 - b]
                    v5: f32 = mul(v4, s)
                    out[4*a + b] = v5
    """)
    for threads in (1, 2):
        assert_same(source, [torch.arange(5).float() + 2, empty(torch.float32, 12)], [5], threads)


@pytest.mark.parametrize("kind", ["sum", "amax"])
def test_a_parallel_loop_may_update_a_state(kind):
    source = text(f"""
        def kernel(x, out, n):
            n = symbol(0, 100)
            x = pointer(f32, 'read')
            out = pointer(f32, 'write')
            with {kind}(f32) as s:
                for a in parallel(n, copies=2):
                    for i in reduction(5, lanes=4):
                        v0: f32 = x[5*a + i]
                        s.update(v0)
            out[0] = s
    """)
    for n in (0, 1, 9):
        for threads in (1, 2):
            assert_same(source, [torch.arange(5 * n).float(), empty(torch.float32, 1)], [n], threads)
