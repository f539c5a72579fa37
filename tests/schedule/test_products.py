"""Matrix products as kernels of our own: tiles, blocks, packed factors, and what follows inside."""

from __future__ import annotations

import re

import numpy
import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.codegen.llvm.function import Function
from ferrite.ir.kernel import Accumulate, Kernel, Scratch, walk
from ferrite.ir.kernel.interpret import run_kernel
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.ir.program.parse import parse as parse_program
from ferrite.machines import Machine
from tests.cases import seldom
from tests.compare import assert_no_farther, assert_same_as_eager, compile_strict, compiled_graphs, reset
from tests.schedule.plans import MACHINE, loops, make, plan_of

quick = pytest.mark.quick
OWN = {"own_products": "always", "check_bounds": True}


def summed(a, b):
    """What a product is, spelled out: no pass is needed to see it."""
    return (a[:, None, :] * b[None, :, :]).sum(-1)


def summed_across(a, b):
    return summed(a.T, b.T)


def kernel_of(fn, rows: int, inner: int, columns: int, machine: Machine = MACHINE) -> Kernel:
    sizes = [(inner, rows), (inner, columns)] if fn is summed_across else [(rows, inner), (columns, inner)]
    (launch,) = plan_of(fn, *map(torch.randn, sizes), machine=machine).launches
    return launch.kernel


def tiles_in(kernel: Kernel) -> int:
    return sum(isinstance(item, Accumulate) for item in walk(kernel.body))


# --- loops ------------------------------------------------------------------------------------------------------------


@quick
def test_registers_hold_a_tile_of_sums():
    kernel = kernel_of(summed, 12, 64, 18)
    (state,) = (item for item in walk(kernel.body) if isinstance(item, Accumulate))
    assert [loop.copies for loop in loops(kernel, "vector") if state in walk(loop.body)] == [6, 4]
    assert parse_kernel(str(kernel)) == kernel


@quick
@pytest.mark.parametrize(
    ("machine", "tile"),
    [(MACHINE, (4, 16)), (Machine(vector_bytes=64), (8, 48)), (Machine(vector_bytes=32, registers=16), (4, 24))],
    ids=["neon", "avx512", "avx2"],
)
def test_a_tile_fits_the_registers(machine, tile):
    """Its sums, and beside them the vectors of a row and one element of the left factor."""
    kernel = kernel_of(summed_across, 24, 16, 96, machine)
    (state,) = (item for item in walk(kernel.body) if isinstance(item, Accumulate))
    rows, columns = (loop for loop in loops(kernel, "vector") if state in walk(loop.body))
    assert (rows.copies, columns.lanes * columns.copies) == tile
    assert rows.copies * columns.copies + columns.copies + 1 <= machine.registers


@quick
def test_what_is_left_over_has_tiles_of_its_own():
    assert tiles_in(kernel_of(summed, 12, 64, 18)) == 1
    assert tiles_in(kernel_of(summed, 13, 64, 18)) == 2
    assert tiles_in(kernel_of(summed, 13, 64, 19)) == 4


@pytest.mark.parametrize(
    ("fn", "sizes", "scratch"),
    [(summed, (5, 17, 7), 1), (summed_across, (5, 17, 7), 0), (summed_across, (9, 16, 10), 2)],
    ids=["dots", "direct", "packed"],
)
@pytest.mark.parametrize("machine", [MACHINE, Machine(vector_bytes=64)], ids=["neon", "avx512"])
def test_the_interpreter_computes_the_same(fn, sizes, scratch, machine):
    """In every form, which the memory that it asks for tells."""
    rows, inner, columns = sizes
    a, b = torch.randn(rows, inner), torch.randn(columns, inner)
    memory = [torch.full([rows * columns], float("nan"))]
    memory += [(item.T if fn is summed_across else item).contiguous().flatten() for item in (a, b)]
    kernel = kernel_of(fn, rows, inner, columns, machine)
    assert len({item.name for item in walk(kernel.body) if isinstance(item, Scratch)}) == scratch
    run_kernel(kernel, memory)
    torch.testing.assert_close(memory[0].view(rows, columns), a @ b.T)


@quick
@pytest.mark.parametrize(
    ("rows", "columns", "packs"),
    [(24, 64, []), (48, 64, ["avx512"]), (3136, 64, ["neon", "avx512"]), (3136, 8, [])],
)
@pytest.mark.parametrize("name", ["neon", "avx512"])
def test_the_right_factor_is_packed_for_many_rows(rows, columns, packs, name):
    kernel = kernel_of(summed, rows, 64, columns, MACHINE if name == "neon" else Machine(vector_bytes=64))
    assert bool(loops(kernel, "reduction")) == (name not in packs)  # vectors lie along what is summed, or do not


@quick
def test_one_row_is_no_matrix():
    assert not loops(kernel_of(summed, 1, 64, 18), "unrolled")
    assert tiles_in(kernel_of(summed, 1, 64, 18)) == 1


# --- values -----------------------------------------------------------------------------------------------------------

SHAPES = {
    "one tile": (4, 16, 6),
    "two rows": (2, 33, 7),
    "three columns": (9, 40, 3),
    "primes": (37, 53, 29),
    "packed": (67, 129, 71),
    "in pieces": (5, 2048, 9),
    "packed, in pieces": (70, 1024, 80),
    "several blocks": (301, 24, 211),
    "too little to sum": (20, 7, 20),
}


def in_all_layouts(a, b, across_a, across_b):
    return a @ b, a @ across_b.T, across_a.T @ b, across_a.T @ across_b.T


@pytest.mark.parametrize("shape", seldom(SHAPES, "several blocks", "packed", "in pieces"))
def test_products_of_any_sizes_and_layouts(shape):
    rows, inner, columns = SHAPES[shape]
    sizes = (rows, inner), (inner, columns), (inner, rows), (columns, inner)
    assert_same_as_eager(in_all_layouts, lambda: [torch.randn(size) for size in sizes], options=OWN)


def test_products_of_doubles():
    """Torch has nothing wider to judge them by, and sums in another order than eager's differ by some units of what was
    added up on the way; numpy has, and tells that ours are no worse."""
    sizes = (67, 530), (530, 71), (530, 67), (71, 530)

    def inputs():
        return [torch.randn(size, dtype=torch.float64) for size in sizes]

    product = assert_same_as_eager(in_all_layouts, inputs, options=OWN, terms=sizes[0][1])
    a, b, *others = inputs()
    exact = a[:8].numpy().astype(numpy.longdouble) @ b.numpy().astype(numpy.longdouble)
    ours, eager = (float(abs(made[:8].numpy() - exact).max()) for made in (product(a, b, *others)[0], a @ b))
    assert ours <= 2 * eager + 4 * torch.finfo(torch.float64).eps


STRIDED = {
    "every second": lambda a, b: torch.mm(a[:, ::2], b[::2]),
    "expanded": lambda a, b: torch.mm(a[:1].expand(9, 40), b),
    "of one tensor": lambda a, b: torch.mm(a, a.T),
    "part of a matrix": lambda a, b: torch.mm(a[3:, 4:36], b[4:36, 1:-1]),
    "batched": lambda a, b: torch.bmm(a.view(2, 10, 40), b.view(20, 2, 26).repeat(2, 1, 1).permute(1, 0, 2)),
    "one matrix for all": lambda a, b: torch.matmul(a.view(2, 10, 40), b),
    "heads side by side": lambda a, b: a.view(10, 5, 16).transpose(0, 1) @ a.view(10, 5, 16).permute(1, 2, 0),
    "a vector": lambda a, b: a[:1] @ b,
}


@pytest.mark.parametrize("case", STRIDED)
def test_products_of_views(case):
    assert_same_as_eager(STRIDED[case], lambda: [torch.randn(20, 40), torch.randn(40, 26)], options=OWN)


def test_infinities_and_none_stay_in_their_rows():
    a, b = torch.randn(70, 520), torch.randn(520, 66)
    a[3, 4], a[5, 6], b[7, 8], b[9, 9] = float("inf"), float("nan"), float("-inf"), 0.0
    a[3, 5], b[5] = float("-inf"), 0.0
    with torch.no_grad():
        made = compile_strict(torch.mm, options=OWN)(a, b)
    exact = (a.double() @ b.double()).float()
    torch.testing.assert_close(made, exact, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_threads_do_not_change_a_bit():
    a, b = torch.randn(200, 1536), torch.randn(1536, 190)
    product = compile_strict(torch.mm, options={"own_products": "always"})
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(product(a, b))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# --- what follows -----------------------------------------------------------------------------------------------------


def operators(fn, *inputs, **options) -> list[set[str]]:
    """The operators in each kernel."""
    reset()
    with torch.no_grad():
        compile_strict(fn, options={**OWN, **options})(*inputs)
    return [set(kernel.operators) for kernel in ferrite.last_compile().kernels]


def layer(x, weight, bias, residual):
    return F.gelu(F.linear(x, weight, bias)) + residual


def layer_inputs(*batch: int):
    rows, inner, columns = batch, 48, 40
    return [
        torch.randn(*rows, inner),
        torch.randn(columns, inner),
        torch.randn(columns),
        torch.randn(*rows, columns),
    ]


@pytest.mark.parametrize("batch", [(18,), (1, 18), (3, 7), (2, 3, 5)], ids=str)
def test_a_layer_is_one_kernel(batch):
    assert_same_as_eager(layer, lambda: layer_inputs(*batch), options=OWN)
    if len(batch) < 3:
        assert len(operators(layer, *layer_inputs(*batch))) == 1


def test_several_results_are_one_kernel():
    def both(x, weight, bias, residual):
        made = F.linear(x, weight, bias)
        return made, made.relu(), made.to(torch.bfloat16)

    assert_same_as_eager(both, lambda: layer_inputs(20), options=OWN)
    assert len(operators(both, *layer_inputs(20))) == 1


def test_what_needs_other_points_comes_after():
    def normalised(x, weight, bias, residual):
        return F.linear(x, weight, bias).softmax(-1)

    assert_same_as_eager(normalised, lambda: layer_inputs(20), options=OWN)
    first, second = operators(normalised, *layer_inputs(20))
    assert "_softmax" in second - first


def test_a_product_does_not_write_what_it_still_reads():
    """The result has the size of a factor, which nobody needs afterwards."""

    def chain(x, weight):
        y = x.exp()
        return (y @ weight).relu() @ weight

    assert_same_as_eager(chain, lambda: [torch.randn(64, 64), torch.randn(64, 64)], options=OWN)


def test_gradients():
    def loss(x, weight, bias, residual):
        return layer(x, weight, bias, residual).square().sum()

    def inputs():
        return [item.requires_grad_() for item in layer_inputs(70)]

    assert_same_as_eager(loss, inputs, backward=True, options=OWN)


@pytest.mark.parametrize("rows", [9, 300], ids=["in each block", "before all"])
def test_no_memory_for_packed_factors_is_torchs_error(monkeypatch, rows):
    def without_memory(self, head, text=Function.text):
        return re.sub("call noalias ptr @malloc.*", "inttoptr i64 0 to ptr", text(self, head))

    monkeypatch.setattr(Function, "text", without_memory)
    reset()
    x, y = torch.randn(rows, 1024), torch.randn(1024, 200)
    with pytest.raises(RuntimeError, match=r"can't allocate memory: you tried to allocate \d+ bytes"):
        compile_strict(torch.mm, options={"own_products": "always", "cache": False})(x, y)


# --- when not ---------------------------------------------------------------------------------------------------------


def called(fn, *inputs, **options) -> bool:
    """Whether torch computes it all."""
    return not operators(fn, *inputs, **options)


def test_torch_keeps_its_kernel():
    inputs = torch.randn(20, 40), torch.randn(40, 26)
    assert not called(torch.mm, *inputs)
    assert called(torch.mm, *inputs, own_products="off")
    assert called(torch.mm, *inputs, numerics="strict")
    assert called(torch.mm, *(item.bfloat16() for item in inputs))


# --- rows that are known at run time ----------------------------------------------------------------------------------

COUNTS = (5, 2, 3, 7, 8, 9, 131, 300)  # all that a last tile can have, several tiles, and several blocks


def of_any_size(fn, maker, counts=COUNTS, dims=(0,), **options):
    """The results for each count, of one graph; `maker`: inputs, of which the last ones have the rows."""
    reset()
    compiled, found = compile_strict(fn, options={**OWN, **options}), {}
    for count in counts:
        inputs = maker(count)
        for item in inputs:
            for dim in dims:
                torch._dynamo.maybe_mark_dynamic(item, dim)
        with torch.no_grad():
            found[count] = compiled(*inputs), fn(*inputs), inputs
    assert compiled_graphs() == 1
    return found


@pytest.mark.parametrize(
    ("inner", "columns", "across"),
    [(48, 20, False), (48, 130, True), (1024, 70, False), (1536, 200, True)],
    ids=["short", "packed", "in pieces", "packed, in pieces"],
)
@pytest.mark.parametrize("first", [5, pytest.param(300, marks=pytest.mark.slow)], ids=["few at first", "many at first"])
def test_one_kernel_for_any_rows(inner, columns, across, first):
    weight = torch.randn(columns, inner)
    if across:
        weight = weight.T.contiguous().T
    made = of_any_size(lambda x: F.linear(x, weight), lambda count: [torch.randn(count, inner)], (first, *COUNTS))
    for ours, eager, (x,) in made.values():
        assert_no_farther(ours, eager, x.double() @ weight.double().T, "result")
    (kernel,) = ferrite.last_compile().kernels
    assert kernel.operators == ("product_default",)


def test_a_row_is_the_same_among_any_others():
    """Whatever the tile that it falls in, and the rows beside it."""
    x, weight = torch.randn(300, 1536), torch.randn(90, 1536)
    made = of_any_size(lambda x: F.linear(x, weight).relu(), lambda count: [x[:count].clone()])
    for count in COUNTS:
        assert torch.equal(made[count][0], made[300][0][:count])


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=["batch", "sequence", "both"])
def test_a_layer_of_any_size_is_one_kernel(dims):
    weight, bias = torch.randn(40, 48), torch.randn(40)

    def inputs(count):
        batch = [count if dim in dims else 3 for dim in (0, 1)]
        return [torch.randn(*batch, 48), torch.randn(*batch, 40)]

    made = of_any_size(lambda x, r: layer(x, weight, bias, r), inputs, (5, 2, 4, 11), dims)
    assert len(ferrite.last_compile().kernels) == 1
    for ours, eager, (x, r) in made.values():
        assert_no_farther(ours, eager, layer(x.double(), weight.double(), bias.double(), r.double()), "result")


def test_a_batch_of_any_size():
    made = of_any_size(torch.bmm, lambda count: [torch.randn(count, 9, 48), torch.randn(count, 48, 33)])
    for ours, eager, (a, b) in made.values():
        assert_no_farther(ours, eager, torch.bmm(a.double(), b.double()), "result")
    assert ferrite.last_compile().kernels


@pytest.mark.parametrize("dim", [0, 1], ids=["sums", "columns"])
def test_of_unknown_columns_and_sums_torch_keeps_its_kernel(dim):
    reset()
    compiled = compile_strict(torch.mm, options=OWN)
    for count in (33, 40):
        y = torch.randn((count, 20) if dim == 0 else (48, count))
        x = torch.randn(20, len(y))
        torch._dynamo.maybe_mark_dynamic(y, dim)
        if dim == 0:
            torch._dynamo.maybe_mark_dynamic(x, 1)
        torch.testing.assert_close(compiled(x, y), x @ y)
    assert compiled_graphs() == 1
    assert not ferrite.last_compile().kernels


OF_ANY_ROWS = """
def f(s0, x, w):
    s0 = symbol(2, None, 12)
    x = input(f32, [s0, 16], strides={x})
    w = input(f32, [20, 16], strides={w})
    y = owned(f32, [s0, 20], strides=[20, 1])
    with reduce('sum', axes(i0=s0, i1=20), over(r0=16)):
        v0: f32 = x[i0, r0]
        v1: f32 = w[i1, r0]
        v2: f32 = mul(v0, v1)
        y[i0, i1] = reduced(v2)
    return y
"""


@quick
@pytest.mark.parametrize("strides", [("[16, 1]", "[16, 1]"), ("[16, 1]", "[1, 20]")], ids=["dots", "packed"])
@pytest.mark.parametrize(
    "machine",
    [MACHINE, pytest.param(Machine(vector_bytes=64), marks=pytest.mark.slow)],
    ids=["neon", "avx512"],
)
@pytest.mark.lengthy
def test_the_interpreter_computes_any_rows(machine, strides):
    program = parse_program(OF_ANY_ROWS.format(x=strides[0], w=strides[1]).strip())
    (launch,) = make(program, machine=machine).launches
    assert parse_kernel(str(launch.kernel)) == launch.kernel
    for rows in (1, 2, 3, 7, 8, 9, 12, 30):
        y, x, w = torch.full([rows * 20], float("nan")), torch.randn(rows, 16), torch.randn(20, 16)
        memory = {"x": x.flatten(), "w": (w if strides[1] == "[16, 1]" else w.T.contiguous()).flatten(), "y": y}
        run_kernel(launch.kernel, [memory[name] for name in launch.arguments], [rows])
        torch.testing.assert_close(y.view(rows, 20), x @ w.T)


def of_large_left_factor():
    return kernel_of(summed_across, 300, 16, 16, Machine(max_shared_panel_bytes=1 << 11))


def test_a_left_factor_that_is_too_large_is_not_packed_as_a_whole():
    """Each block packs its part, and the right factor is packed for all."""
    kernel = of_large_left_factor()
    before, blocks = loops(kernel, "parallel")
    assert [any(isinstance(item, Scratch) for item in walk(loop.body)) for loop in (before, blocks)] == [False, True]
    assert sum(isinstance(item, Scratch) for item in walk(kernel.body)) == 2


@pytest.mark.slow
def test_a_left_factor_that_is_packed_in_parts():
    memory = [torch.full([300 * 16], float("nan")), torch.randn(16 * 300), torch.randn(16 * 16)]
    run_kernel(of_large_left_factor(), memory)
    torch.testing.assert_close(memory[0].view(300, 16), memory[1].view(16, 300).T @ memory[2].view(16, 16))
