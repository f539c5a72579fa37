"""Matrix products of bytes as kernels of our own: every bit of torch's, whatever the sizes and how the factors lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ferrite
from ferrite.codegen.llvm.build import assembly
from ferrite.codegen.llvm.emit import kernel_text
from ferrite.codegen.llvm.processor import AVX512_VNNI, PORTABLE_ARM, PROCESSORS, Processor, byte_dots
from ferrite.ir.kernel import Kernel
from ferrite.ir.kernel.interpret import run_kernel
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.machines import NEOVERSE_N1, XEON, Machine, host_machine
from tests.compare import assert_same_as_eager, compile_strict, compiled_graphs, reset

quick = pytest.mark.quick
OWN = {"own_products": "always", "check_bounds": True}
SIZES = [
    (1, 16, 2),
    (1, 1024, 300),
    (2, 64, 1),
    (3, 17, 5),
    (5, 32, 6),
    (33, 256, 100),
    (17, 33, 50),
    (7, 2060, 97),
    (130, 128, 200),
    (8, 4096, 64),
]


def bytes_of(*shape: int) -> torch.Tensor:
    """Random ones, and those with which sums are greatest."""
    made = torch.randint(-128, 128, shape, dtype=torch.int8)
    made[0] = -128
    return made


def linear(x: Any, weight: Any) -> Any:
    return torch._int_mm(x, weight.t())


def matmul(x: Any, y: Any) -> Any:
    return torch._int_mm(x, y)


def scaled(x: Any, weight: Any, scale: Any, bias: Any) -> Any:
    """A layer of a model that was quantised as it runs: rows and columns have scales of their own."""
    row = x.abs().amax(-1, keepdim=True) / 127
    quantised = (x / row).round().clamp(-128, 127).to(torch.int8)
    return torch._int_mm(quantised, weight.t()).to(torch.float32) * row * scale + bias


def calls() -> list[str]:
    return [call.operator for graph in ferrite.last_compile().graphs for call in graph.eager_calls]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("fn", [linear, matmul])
def test_any_sizes(fn, sizes):
    rows, inner, columns = sizes
    right = (columns, inner) if fn is linear else (inner, columns)
    assert_same_as_eager(fn, lambda: [bytes_of(rows, inner), bytes_of(*right)], options=OWN)
    assert calls() == []


@pytest.mark.parametrize("left", ["rows", "columns", "steps", "offset"])
@pytest.mark.parametrize("right", ["rows", "columns", "steps", "offset"])
def test_any_strides(left, right):
    def laid_out(rows, columns, how):
        if how == "columns":
            return bytes_of(columns, rows).t()
        if how == "steps":
            return bytes_of(2 * rows, 3 * columns)[::2, ::3]
        return bytes_of(rows + 1, columns + 3)[1:, 3:] if how == "offset" else bytes_of(rows, columns)

    inputs = [laid_out(37, 68, left), laid_out(68, 51, right)]
    compiled = compile_strict(matmul, options=OWN)
    assert torch.equal(compiled(*inputs), inputs[0].int() @ inputs[1].int())
    assert calls() == []


def test_sums_that_do_not_fit_wrap():
    """2**16 products of 2**14 are 2**30; twice that many do not fit, and the product is torch's."""
    x, y = torch.full((2, 1 << 16), -128, dtype=torch.int8), torch.full((1 << 16, 3), -128, dtype=torch.int8)
    assert compile_strict(matmul, options=OWN)(x, y).unique().tolist() == [1 << 30]
    assert calls() == []


@pytest.mark.parametrize("sizes", [(0, 32, 6), (5, 0, 6), (5, 32, 0), (4, 8, 8)], ids=str)
def test_what_has_no_elements_or_short_sums_is_torchs(sizes):
    rows, inner, columns = sizes
    inputs = [torch.ones(rows, inner, dtype=torch.int8), torch.ones(inner, columns, dtype=torch.int8)]
    assert torch.equal(compile_strict(matmul, options=OWN)(*inputs), inputs[0].int() @ inputs[1].int())
    assert calls() == ["aten._int_mm.default"]


def test_rows_that_are_known_at_run_time_only():
    reset()
    compiled, weight = torch.compile(linear, backend="ferrite", dynamic=True, options={**OWN, "strict": True}), None
    weight = bytes_of(48, 64)
    torch._dynamo.mark_static(weight)
    for rows in (7, 3, 64, 129, 2):
        x = bytes_of(rows, 64)
        assert torch.equal(compiled(x, weight), linear(x, weight))
    assert calls() == []
    assert compiled_graphs() == 1


def test_the_number_of_columns_must_be_known():
    reset()
    compiled = torch.compile(matmul, backend="ferrite", dynamic=True, options={**OWN, "strict": True})
    for columns in (7, 12):
        x, y = bytes_of(5, 32), bytes_of(32, columns)
        assert torch.equal(compiled(x, y), x.int() @ y.int())
    assert "aten._int_mm.default" in calls()


def test_what_follows_is_in_the_kernel():
    inputs = [torch.randn(9, 64), bytes_of(40, 64), torch.rand(40), torch.randn(40)]
    assert_same_as_eager(scaled, lambda: inputs, options=OWN)
    assert calls() == []
    last = ferrite.last_compile().kernels[-1]
    assert {"byte_product_default", "add"} <= set(last.operators) or "add" in last.name


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_share_a_product(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same_as_eager(linear, lambda: [bytes_of(300, 512), bytes_of(300, 512)], options=OWN)
    finally:
        torch.set_num_threads(before)


# --- frozen -----------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, inner: int, columns: int, by_columns: bool = True) -> None:
        super().__init__()
        weight = bytes_of(columns, inner).t() if by_columns else bytes_of(inner, columns)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.rand(columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(x, self.weight) * self.scale


def bytes_in_panels() -> int:
    return sum(done.facts.get("bytes in panels", 0) for graph in ferrite.last_compile().graphs for done in graph.passes)


@pytest.mark.parametrize("sizes", [size for size in SIZES if size[0] > 1], ids=str)
@pytest.mark.parametrize("by_columns", [True, False])
def test_frozen_weights_lie_in_panels_of_words(sizes, by_columns):
    rows, inner, columns = sizes
    reset()
    model, x = Layer(inner, columns, by_columns).eval(), bytes_of(rows, inner)
    assert torch.equal(ferrite.freeze(model, strict=True, **OWN)(x), model(x))
    assert calls() == []
    width = host_machine().panel_columns(torch.int32)
    assert bytes_in_panels() == 4 * -(-inner // 4) * -(-columns // width) * width


def test_one_weight_is_stored_once():
    reset()
    model = Layer(64, 40).eval()

    def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(x).sum() + model(y).sum()

    x, y = bytes_of(4, 64), bytes_of(6, 64)
    compiled = torch.compile(twice, backend="ferrite", options={**OWN, "freeze": True, "strict": True})
    with torch.no_grad():
        assert torch.allclose(compiled(x, y), twice(x, y), rtol=1e-5)
    width = host_machine().panel_columns(torch.int32)
    assert bytes_in_panels() in (64 * width * -(-40 // width), 2 * 64 * width * -(-40 // width))


def test_a_weight_that_changed_is_packed_again():
    reset()
    model, x = Layer(64, 40).eval(), bytes_of(5, 64)
    compiled = ferrite.freeze(model, strict=True, **OWN)
    assert torch.equal(compiled(x), model(x))
    model.weight.add_(1)
    assert torch.equal(compiled(x), model(x))


def test_one_row_reads_the_weight_as_it_is():
    reset()
    model, x = Layer(64, 40).eval(), bytes_of(1, 64)
    assert torch.equal(ferrite.freeze(model, strict=True, **OWN)(x), model(x))
    assert bytes_in_panels() == 0


# --- instructions -----------------------------------------------------------------------------------------------------

DOTS = """
def kernel(x, y, out):
    x = pointer({left}, 'read')
    y = pointer(i8, 'read')
    out = pointer(i32, 'write')
    for i in vector({count}, lanes={lanes}):
        with sum(i32) as total:
            for k in serial(3):
                a0: {left} = x[12*i + 4*k]
                a1: {left} = x[12*i + 4*k + 1]
                a2: {left} = x[12*i + 4*k + 2]
                a3: {left} = x[12*i + 4*k + 3]
                a: i32 = pack_bytes(a0, a1, a2, a3)
                b0: i8 = y[4*k]
                b1: i8 = y[4*k + 1]
                b2: i8 = y[4*k + 2]
                b3: i8 = y[4*k + 3]
                b: i32 = pack_bytes(b0, b1, b2, b3)
                c: i32 = {dot}(a, b)
                total.update(c)
        out[i] = total
"""


def dots(dot: str, lanes: int, count: int = 21) -> Kernel:
    return parse_kernel(DOTS.format(left="u8" if "u8" in dot else "i8", dot=dot, lanes=lanes, count=count))


@quick
@pytest.mark.parametrize("dot", ["dot_s8s8", "dot_u8s8"])
def test_the_interpreter_multiplies_bytes(dot):
    left = torch.uint8 if "u8" in dot else torch.int8
    info = torch.iinfo(left)
    x = torch.randint(info.min, info.max + 1, (5, 12), dtype=left)
    y, out = bytes_of(12), torch.zeros(5, dtype=torch.int32)
    run_kernel(dots(dot, 1, 5), [x.flatten(), y, out])
    assert torch.equal(out, (x.int() * y.int()).sum(1, dtype=torch.int32))


INSTRUCTIONS = [
    ("avx512-vnni", "dot_u8s8", 16, "vpdpbusd"),
    ("avx512", "dot_u8s8", 16, "vpmaddwd"),
    ("avx512", "dot_s8s8", 16, "vpmaddwd"),
    ("avx2", "dot_u8s8", 8, "vpmaddwd"),
    ("portable-x86", "dot_u8s8", 4, "pmaddwd"),
    ("portable-arm", "dot_s8s8", 4, "mla"),
]


@pytest.mark.parametrize(("processor", "dot", "lanes", "instruction"), INSTRUCTIONS)
def test_processors_multiply_bytes_with_what_they_have(processor, dot, lanes, instruction):
    one = PROCESSORS[processor]
    assert instruction in assembly(kernel_text(dots(dot, lanes), one, "kernel"), one)


def test_arm_with_dot_products():
    one = Processor("n1", PORTABLE_ARM.triple, "neoverse-n1", "", 4, registers=32, byte_dots="dotprod")
    assert "sdot" in assembly(kernel_text(dots("dot_s8s8", 4), one, "kernel"), one)


@quick
def test_what_a_processor_says_of_itself():
    assert byte_dots({"avx512vnni", "avx512f"}, 16) == "vnni"
    assert byte_dots({"avx512vnni"}, 8) is None
    assert byte_dots({"avxvnni"}, 8) == "vnni"
    assert byte_dots({"dotprod"}, 4) == "dotprod"
    assert byte_dots({"avx2"}, 8) is None
    assert AVX512_VNNI.byte_dots == "vnni"


@quick
def test_machines_say_which_factor_has_signs():
    assert XEON.unsigned_bytes
    assert not NEOVERSE_N1.unsigned_bytes
    assert not Machine().unsigned_bytes


@pytest.mark.parametrize("dot", ["dot_s8s8", "dot_u8s8"])
@pytest.mark.parametrize("lanes", [1, 4, 8, 16])
def test_this_machine_multiplies_bytes_in_vectors_of_any_length(dot, lanes):
    from tests.llvm_kernels import native

    left = torch.uint8 if "u8" in dot else torch.int8
    info = torch.iinfo(left)
    x = torch.randint(info.min, info.max + 1, (21, 12), dtype=left)
    y, out = bytes_of(12), torch.zeros(21, dtype=torch.int32)
    assert native(str(dots(dot, lanes)))([x.flatten(), y, out])[0] == 0
    assert torch.equal(out, (x.int() * y.int()).sum(1, dtype=torch.int32))
