"""The shapes of kernels for a GPU: which loops are the grid, how large blocks are, what is done in pieces."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ferrite.passes  # noqa: F401  # operators of our own
from ferrite.codegen.triton import kernel_source, launch_of
from ferrite.codegen.triton.emit import written
from ferrite.codegen.triton.launch import OPTIONS
from ferrite.codegen.triton.run import loaded
from ferrite.runtime.cuda.kernels import type_name
from tests.gpu_plans import MACHINE, kernels_of, loops, plan_of

BF16 = torch.bfloat16


def one_kernel(function, *inputs):
    (kernel,) = kernels_of(function, *inputs)
    return kernel


def lanes(kernel, kind):
    return [loop.lanes for loop in loops(kernel, kind)]


def made(*sizes, dtype=torch.float32):
    """Memory that nobody touches: only its form matters."""
    return torch.empty(sizes, dtype=dtype)


def test_pointwise_is_flat_and_has_no_masks_where_blocks_divide_it():
    kernel = one_kernel(lambda x, y: x + y, made(2048, 1024), made(2048, 1024))
    assert lanes(kernel, "vector") == [1024]
    assert kernel.warps == 4
    source = kernel_source(kernel, "add")
    assert "mask" not in source
    assert "int64" not in source
    assert launch_of(kernel, "add").instances([]) == 2048


def test_little_work_is_spread_over_more_programs():
    few = one_kernel(lambda x: x + 1, made(1000))
    assert launch_of(few, "few").instances([]) == 8


def test_a_short_last_axis_leaves_no_lane_idle():
    kernel = one_kernel(lambda x, w: x * w, made(65536, 48), made(48))
    assert lanes(kernel, "vector") == [1024], "one axis for both: 48 elements of a block of 64 would be in use"
    tidy = one_kernel(lambda x, w: x * w, made(65536, 64), made(64))
    assert lanes(tidy, "vector") == [16, 64]


def test_a_transposition_has_square_blocks():
    kernel = one_kernel(lambda x: (x.t() + 1).contiguous(), made(4096, 4096, dtype=BF16))
    assert lanes(kernel, "vector") == [128, 128]
    single = one_kernel(lambda x: (x.t() + 1).contiguous(), made(4096, 4096))
    assert lanes(single, "vector") == [64, 64]


def test_a_row_is_kept():
    kernel = one_kernel(lambda x: x.softmax(-1), made(4096, 1000, dtype=BF16))
    assert lanes(kernel, "reduction") == [1024, 1024]
    source = kernel_source(kernel, "softmax")
    assert source.count("tl.load(") == 1, "nothing is loaded twice"
    assert source.count("tl.exp(") == 1


def test_several_short_rows_are_one_program():
    kernel = one_kernel(lambda x: x.softmax(-1), made(65536, 32))
    assert lanes(kernel, "vector")[0] == 64
    few = one_kernel(lambda x: x.softmax(-1), made(64, 32))
    assert lanes(few, "vector")[0] == 1, "but not where most of the machine would be idle"


def test_a_long_row_is_gone_through_twice():
    kernel = one_kernel(lambda x: x.softmax(-1), made(512, 65536, dtype=BF16))
    assert lanes(kernel, "reduction") == [16384], "one pass with a state that moves"
    assert kernel.warps == 32
    first, second = (line for line in kernel_source(kernel, "softmax").splitlines() if "tl.load(" in line)
    assert "evict_last" in first, "the cache should have the row when it is read again"
    assert "evict_first" in second


def test_a_row_of_unknown_length_is_kept_where_it_is_short():
    def both(function, *inputs):
        (kernel,) = (launch.kernel for launch in plan_of(function, *inputs, dynamic=True).launches)
        return kernel_source(kernel, "kernel")

    source = both(lambda x: x.softmax(-1), made(32768, 1000, dtype=BF16))
    assert "s1 <= 1024" in source
    _, short, long = re.split(r"if v\w*:", source)
    assert short.count("tl.load(") == 1, "a row is loaded once"
    assert "for " not in short
    assert long.count("for ") == 3
    assert "<= 1024" not in both(lambda x: x.softmax(-1), made(512, 65536, dtype=BF16)), "too long to be kept"
    sums = both(lambda x: x.sum(-1), made(32768, 1000, dtype=BF16))
    assert "<=" not in sums, "it is loaded once anyway"
    assert "[2, 1024]" in sums, "as many rows as of a length that is known"


def test_columns_are_reduced_in_blocks_of_whole_lines_by_enough_programs():
    first, second = kernels_of(lambda x: x.sum(0), made(32768, 1024, dtype=BF16))
    assert launch_of(first, "first").instances([]) >= 132
    assert lanes(first, "vector") == [64]
    assert launch_of(second, "second").instances([]) >= 8


def test_columns_that_a_program_can_hold_are_one_block():
    """All that a program loads is under way at once, and nothing is loaded twice."""
    images = made(32, 1024, 14, 14, dtype=BF16).to(memory_format=torch.channels_last)
    pieces, last = kernels_of(lambda x: torch.var_mean(x.float(), (0, 2, 3)), images)
    assert lanes(pieces, "reduction") == [128]
    assert launch_of(pieces, "pieces").instances([]) >= 528
    assert " in range(" not in kernel_source(pieces, "pieces")
    assert kernel_source(last, "last").count("tl.load(") == 2, "means of pieces, and deviations from them"
    longer = made(32, 256, 56, 56, dtype=BF16).to(memory_format=torch.channels_last)
    pieces, _last = kernels_of(lambda x: torch.var_mean(x.float(), (0, 2, 3)), longer)
    source = kernel_source(pieces, "pieces")
    assert source.count(" in range(") == 1
    assert "tl.load(" in source.partition(" in range(")[0], "the number that deviations are from is loaded before"


def test_functions_that_are_rounded_away_are_quick():
    x = made(4096, dtype=BF16)
    source = kernel_source(one_kernel(lambda x: x / (1 + torch.exp(-x.float())), x), "kernel")
    assert "libdevice.exp(" in source, "the result has 32 bits"
    source = kernel_source(one_kernel(lambda x: (x.float() / (1 + torch.exp(-x.float()))).to(BF16), x), "kernel")
    assert "quick_exp(" in source
    both = kernel_source(
        one_kernel(lambda x: ((y := torch.exp(-x.float())).to(BF16), (1 / (1 + y)).to(BF16)), x), "kernel"
    )
    assert "tl.exp(" in both, "the smallest of them are seen"
    assert "* 0.0078125" in kernel_source(one_kernel(lambda x: x / 128, made(4096)), "kernel")
    assert "divide(" in kernel_source(one_kernel(lambda x: x / 127, made(4096)), "kernel"), "a product rounds otherwise"
    assert "divide(" in kernel_source(one_kernel(lambda x: x / 2.0**127, made(4096)), "kernel")


def test_what_is_read_once_need_not_stay_in_the_cache():
    hint = 'eviction_policy="evict_first"'
    large, small = made(32768, 1024, dtype=BF16), made(1024, 1024, dtype=BF16)
    assert hint in kernel_source(one_kernel(lambda x: x.float().sum(1), large), "kernel")
    assert hint not in kernel_source(one_kernel(lambda x: x.float().sum(1), small), "kernel"), "the cache holds it"
    assert hint not in kernel_source(one_kernel(lambda x: x + 1, large), "kernel"), "as much is written"
    (rows,) = kernels_of(lambda x: x.float().softmax(-1).sum(1), made(512, 65536, dtype=BF16))
    loads = [line for line in kernel_source(rows, "kernel").splitlines() if "tl.load(" in line]
    assert [hint in line for line in loads] == [False, True], "it is read twice"
    scaled = kernel_source(one_kernel(lambda x, w: (x * w).float().sum(1), large, made(1024, dtype=BF16)), "kernel")
    assert scaled.count(hint) == 1, "the weights are read by every program"
    first, *_ = kernels_of(lambda x: x.cumsum(0), made(1 << 25, dtype=BF16))
    assert hint not in kernel_source(first, "kernel"), "another kernel reads it, too"


def test_rows_and_columns_are_gone_through_once():
    def backward(g, x):
        dx = torch.ops.aten.gelu_backward(g, x)
        return dx, dx.sum(0)

    first, second = kernels_of(backward, made(32768, 1024, dtype=BF16), made(32768, 1024, dtype=BF16))
    source = kernel_source(first, "kernel")
    assert "num_stages=3" in source
    assert "quick_ndtr" in source, "what is rounded to 16 bits before anything else sees it"
    assert launch_of(first, "first").instances([]) == 1024
    assert launch_of(second, "second").instances([]) == 128, "parts of lines will do where the cache has all of it"
    apart = kernels_of(backward, made(64, 1024, dtype=BF16), made(64, 1024, dtype=BF16))
    assert all(not loops(kernel, "serial") for kernel in apart), "so little that the cache has it still"
    narrow = kernels_of(backward, made(131072, 256, dtype=BF16), made(131072, 256, dtype=BF16))
    assert all(not loops(kernel, "serial") for kernel in narrow), "a row is too little work for a step"


def test_what_every_row_reads_is_loaded_before_the_first():
    def backward(g, x, w, b):
        dx = (x * w + b).sin() * g
        return dx, dx.sum(0)

    tensors = [made(32768, 1024, dtype=BF16), made(32768, 1024, dtype=BF16)]
    first, _ = kernels_of(backward, *tensors, made(1024, dtype=BF16), made(1024, dtype=BF16))
    before, inside = kernel_source(first, "kernel").split("tl.range(")
    assert before.count("tl.load(") == 2, "weights and biases"
    assert inside.count("tl.load(") == 2
    first, _ = kernels_of(backward, *tensors, made(32768, 1, dtype=BF16), made(1, dtype=BF16))
    before, inside = kernel_source(first, "kernel").split("tl.range(")
    assert before.count("tl.load(") == 0, "a number of a row is no line"

    def padded(g, x, w):
        dx = (x + F.pad(w, (0, 24))).sin() * g
        return dx, dx.sum(0)

    first, _ = kernels_of(padded, *tensors, made(1000, dtype=BF16))
    before, inside = kernel_source(first, "kernel").split("tl.range(")
    assert before.count("tl.load(") == 0, "what a mask guards may not be there"


def test_few_results_are_made_of_pieces():
    first, second = kernels_of(lambda x: x.sum(), made(8192, 1024))
    assert launch_of(first, "first").instances([]) == 1024
    assert "mask" not in kernel_source(first, "first")
    assert launch_of(second, "second").instances([]) == 1
    longer, _ = kernels_of(lambda x: x.sum(), made(131072, 1024))
    assert launch_of(longer, "longer").instances([]) == 4096, "so that the last programs are few of all"
    (small,) = kernels_of(lambda x: x.sum(), made(40, 50))
    assert launch_of(small, "small").instances([]) == 1


def test_a_number_that_two_kernels_read_does_not_make_them_one():
    """As a learning rate is read by the steps of all parameters: each is a chain of its own."""

    def steps(rate, *tensors):
        return [tensor * rate + index for index, tensor in enumerate(tensors)]

    assert len(kernels_of(steps, made(), made(300), made(200))) == 2
    assert len(kernels_of(steps, made(), made(300), made(300))) == 1, "rows in common"
    assert len(kernels_of(lambda x: (x.amax(1), x.sum(0)), made(40, 50))) == 1, "what both read is more"


def test_channels_that_lie_side_by_side_are_shared_by_pieces_of_images():
    """Images are too few to keep a GPU busy, and so are their rows."""
    images = made(32, 64, 56, 56, dtype=BF16).to(memory_format=torch.channels_last)
    first, second = kernels_of(lambda x: x.float().sum((0, 2, 3)), images)
    assert launch_of(first, "first").instances([]) == 32 * 28
    assert launch_of(second, "second").instances([]) <= 8
    parts, whole, apply = kernels_of(lambda x: F.batch_norm(x, None, None, training=True), images)
    assert launch_of(parts, "parts").instances([]) == 32 * 28
    assert launch_of(whole, "whole").instances([]) <= 8
    assert not loops(apply, "reduction")
    exact = kernels_of(lambda x: F.batch_norm(x, None, None, training=True), images.float())
    assert len(exact) == 5, "of numbers of 32 bits, deviations from one of them are not exact"


def test_windows_are_written_out_and_lanes_are_results():
    kernel = one_kernel(lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2), made(8, 64, 112, 112, dtype=BF16))
    assert not loops(kernel, "reduction")
    assert kernel_source(kernel, "pool").count("tl.load(") == 6, "two of three in a row are one load"
    source = kernel_source(kernel, "pool")
    assert source.count(">=") == 2, "only the first row and the first column of a window may lie outside"
    assert "tl.where(" not in source, "a load says itself what is outside"
    assert "int64" not in source
    assert kernel.warps == 2, "four elements for each thread"
    for length in (5, 9):
        rows = one_kernel(lambda x: x.amax(-1), made(65536, length))
        assert loops(rows, "reduction"), "elements of neighbours are far apart"
    apart = one_kernel(lambda x: F.avg_pool2d(x, 7, 7), made(64, 64, 56, 56, dtype=BF16))
    assert not loops(apart, "reduction"), "windows side by side share the lines that they read"


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_no_load_gives_an_infinity_of_16_bits(dtype):
    """Of two negative infinities in pairs of 16 bits, an assembler made a positive one."""
    functions = [
        lambda x: x.amax((-1, -2)),
        lambda x: x.softmax(-1),
        lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: x.masked_fill(x < 0, -torch.inf).amax(-1),
    ]
    for function in functions:
        (kernel, *_) = kernels_of(function, made(8, 4, 5, 3, dtype=dtype))
        source = kernel_source(kernel, "extreme")
        loads = [line for line in source.splitlines() if "tl.load(" in line]
        assert loads
        assert dtype is torch.float32 or not any("inf" in line for line in loads), source


def test_blocks_of_odd_images_have_few_lanes_outside():
    kernel = one_kernel(lambda x: F.max_pool2d(x, 3, 2, 1), made(64, 256, 56, 56, dtype=BF16))
    assert lanes(kernel, "vector") == [8, 32], "rows of all images are one axis"
    assert launch_of(kernel, "pool").instances([]) == 64 * 256 * 28 // 8


def test_a_few_rows_are_one_kernel_while_they_are_short():
    assert len(kernels_of(lambda x, y: F.layer_norm(x + y, (4096,)), made(8, 4096), made(8, 4096))) == 1
    assert len(kernels_of(lambda x: x.softmax(-1), made(8, 8192))) == 1
    assert len(kernels_of(lambda x: x.softmax(-1), made(8, 50304))) > 2, "pieces, which programs share"


def test_the_place_of_the_greatest_is_the_first_that_has_it():
    kernel = one_kernel(lambda x: x.argmax(-1), made(4096, 1024, dtype=BF16))
    assert [loop.lanes for loop in loops(kernel, "reduction")] == [1024, 1024]
    assert kernel_source(kernel, "argmax").count("tl.load(") == 1
    long = one_kernel(lambda x: x.argmax(-1), made(4096, 100000, dtype=BF16))
    assert len(loops(long, "reduction")) == 1, "a long row is gone through once"
    assert len(kernels_of(lambda x: x.argmax(), made(4096, 1024))) == 4, "pieces for the greatest, and for its place"


def test_a_scatter_is_flat_and_atomic():
    places = torch.zeros(512, dtype=torch.int64)
    kernels = kernels_of(lambda x, i, s: x.index_add(0, i, s), made(64, 256), places, made(512, 256))
    assert any("tl.atomic_add(" in kernel_source(kernel, "scatter") for kernel in kernels)
    assert all(not loops(kernel, "serial") for kernel in kernels)


def test_what_is_not_deterministic_is_a_call_where_torch_is_to_be():
    places = torch.zeros(512, dtype=torch.int64)
    torch.use_deterministic_algorithms(True)
    try:
        plan = plan_of(lambda x, i, s: x.index_add(0, i, s), made(64, 256), places, made(512, 256))
    finally:
        torch.use_deterministic_algorithms(False)
    assert any("deterministic" in refusal.reason for refusal in plan.not_compiled.values())


def test_a_few_long_scans_are_done_in_pieces():
    first, second, third = kernels_of(lambda x: x.cumsum(-1), made(2, 1 << 20))
    assert launch_of(first, "first").instances([]) == 512
    assert launch_of(second, "second").instances([]) == 2
    assert launch_of(third, "third").instances([]) >= 512
    reads = [line for line in kernel_source(third, "third").splitlines() if "tl.load(" in line]
    assert sum("[" in line for line in reads) == 0, "what the pieces before come to is one load for a piece"
    assert len(kernels_of(lambda x: x.cumsum(-1), made(512, 1 << 17))) == 1, "many rows"
    assert len(kernels_of(lambda x: x.cumsum(-1), made(2, 1 << 10))) == 1, "short ones"


def layer(x, w, b):
    """As passes write a linear layer in 16 bits."""
    return F.silu((torch.ops.ferrite.wide_product(x, w.t()) + b).to(x.dtype))


# --- whole kernels ----------------------------------------------------------------------------------------------------

WHOLE = {
    "add": (lambda x, y: x + y, [made(2048, 1024, dtype=BF16)] * 2),
    "softmax": (lambda x: x.softmax(-1), [made(4096, 1000)]),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (1024,), w, b),
        [made(4096, 1024, dtype=BF16), made(1024), made(1024)],
    ),
    "column_sum": (lambda x: x.sum(0), [made(32768, 1024, dtype=BF16)]),
    "transpose": (lambda x: (x.t() + 1).contiguous(), [made(4096, 2048)]),
    "layer": (layer, [made(2048, 768, dtype=BF16), made(1000, 768, dtype=BF16), made(1000, dtype=BF16)]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_source_of_whole_kernels(name, golden):
    function, inputs = WHOLE[name]
    sources = [kernel_source(kernel, f"{name}_{number}") for number, kernel in enumerate(kernels_of(function, *inputs))]
    assert "\n\n".join(sources) == golden


# --- what Triton's compiler says --------------------------------------------------------------------------------------

COMPILED = {
    **WHOLE,
    "thin_layer": (layer, [made(8, 4096, dtype=BF16), made(8192, 4096, dtype=BF16), made(8192, dtype=BF16)]),
    "layer_in_float32": (layer, [made(100, 768), made(768, 768), made(768)]),
    "long_softmax": (lambda x: x.softmax(-1), [made(512, 65536, dtype=BF16)]),
    "argmax": (lambda x: x.argmax(-1), [made(4096, 1024)]),
    "cumsum": (lambda x: x.cumsum(-1), [made(512, 10000)]),
    "long_cumsum": (lambda x: x.cumsum(-1), [made(2, 1 << 20)]),
    "topk": (lambda x: x.softmax(-1).topk(8), [made(8192, 64)]),
    "cummax": (lambda x: x.cummax(-1), [made(512, 10000, dtype=BF16)]),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), [made(512, 10000)]),
    "scatter": (
        lambda x, i, s: x.index_add(0, i, s),
        [made(64, 256, dtype=BF16), torch.zeros(512, dtype=torch.int64), made(512, 256, dtype=BF16)],
    ),
    "statistics": (lambda x: torch.var_mean(x, -1), [made(512, 100000)]),
    "max_pool": (lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2), [made(64, 64, 56, 56, dtype=BF16)]),
    "column_sums_beside": (lambda x, y, z: [each.sum(0) for each in (x, y, z)], [made(2048, 768, dtype=BF16)] * 3),
    "turned_beside": (
        lambda x, y, c: [each * c + torch.cat([-each[..., 32:], each[..., :32]], -1) for each in (x, y)],
        [made(8, 256, 12, 64, dtype=BF16).transpose(1, 2)] * 2 + [made(256, 64, dtype=BF16)],
    ),
    "column_sums_too": (lambda x, g: (g * x.softmax(-1), (g * x).sum(0)), [made(8192, 1024, dtype=BF16)] * 2),
}


def quantized(x):
    scale = 448 / x.float().abs().amax(1, keepdim=True).clamp(min=1e-9)
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


COMPILED["float8"] = quantized, [made(4096, 4096, dtype=BF16)]
MORE = [name for name in COMPILED if name not in ("layer_norm", "scatter", "column_sums_too", "thin_layer")]


def compiled_by_triton(kernel, capability, folder, monkeypatch):
    """All forms of a kernel, from Triton's own text to the code of a GPU that need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    source = written(kernel, "kernel")
    function = loaded(source.source, "kernel", False)
    types = [f"*{type_name(one.dtype)}" for one in source.launch.pointers]
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(types))}
    types += ["*i64"] * bool(source.launch.checks)
    given = ASTSource(function, dict(zip(function.arg_names, types, strict=True)), {}, aligned)
    options = {**OPTIONS, "num_warps": kernel.warps}
    return triton.compile(given, target=GPUTarget("cuda", capability, 32), options=options).asm


def registers_and_spills(kernel, capability, folder, monkeypatch):
    """What the assembler says of a kernel."""
    import triton

    ptx = compiled_by_triton(kernel, capability, folder, monkeypatch)["ptx"]
    (folder / "kernel.ptx").write_text(ptx)
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    suffix = "a" if capability >= 90 else ""
    command = [str(assembler), f"-arch=sm_{capability}{suffix}", "-v", str(folder / "kernel.ptx"), "-o", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"Used (\d+) registers", said)[1]), int(re.search(r"(\d+) bytes spill stores", said)[1])


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_sums_of_float32_are_added_block_by_block(tmp_path, monkeypatch):
    """Triton would have each block go on with the sum of those before, in one chain that rounds as often as it is long:
    of 4096 products a sum was 12 times as far from float64 as torch's."""
    (kernel,) = kernels_of(*COMPILED["layer_in_float32"][:1], *COMPILED["layer_in_float32"][1])
    text = compiled_by_triton(kernel, 90, tmp_path, monkeypatch)["ttir"]
    (product,) = re.findall(r"(%\S+) = tt.dot %\S+ %\S+ %cst", text)
    assert re.search(rf"arith.addf %\S+ {product} :", text)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("function", "inputs", "is_one"),
    [
        (lambda x, y: x * y + x, [made(4096, dtype=BF16)] * 2, False),  # eager rounds the product to 16 bits
        (lambda x, y: (x * y).float() - 1, [made(4096, dtype=BF16)] * 2, False),
        (lambda x, y: x * y - y * x, [made(4096)] * 2, False),  # is zero, not what a product's rounding took
        (lambda x, y: torch.where(x > 0, x * y, 0.0) + x * y, [made(4096)] * 2, False),
        (lambda x, y: x * y + x, [made(4096)] * 2, True),
        (lambda x, y: (x.float() * y.float() + x).to(BF16), [made(4096, dtype=BF16)] * 2, True),
    ],
)
def test_a_sum_is_one_instruction_with_a_product_where_no_rounding_is_lost(
    function, inputs, is_one, tmp_path, monkeypatch
):
    (kernel,) = kernels_of(function, *inputs)
    text = compiled_by_triton(kernel, 90, tmp_path, monkeypatch)["ptx"]
    assert bool(re.search(r"fma\.rn", text)) is is_one


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "name",
    [
        "layer_norm",
        "scatter",
        "column_sums_too",
        "thin_layer",
        *(pytest.param(name, marks=pytest.mark.slow) for name in MORE),
    ],
)
def test_kernels_compile_and_keep_everything_in_registers(name, capability, tmp_path, monkeypatch):
    function, inputs = COMPILED[name]
    kernels = kernels_of(function, *inputs)
    assert kernels
    for kernel in kernels:
        registers, spilled = registers_and_spills(kernel, capability, tmp_path, monkeypatch)
        assert spilled == 0
        assert registers * 32 * kernel.warps <= MACHINE.registers
