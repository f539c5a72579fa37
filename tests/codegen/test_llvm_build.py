"""Objects, loading, the driver of many kernels, and compiling from many threads."""

from __future__ import annotations

import ctypes
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ferrite.codegen.llvm.build import assembly, load, object_code
from ferrite.codegen.llvm.driver import FAILURE_WORDS, driver_address, pack_steps, with_rest
from ferrite.codegen.llvm.emit import kernel_text
from ferrite.codegen.llvm.processor import AVX2, AVX512, PROCESSORS, host_processor
from ferrite.codegen.llvm.runtime_symbols import PARALLEL, openmp_library, runtime_symbols
from ferrite.codegen.llvm.words import IMMEDIATE
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.ir.types import short
from tests.llvm_kernels import SIGNATURE, assert_same
from tests.loop_kernels import GATHER, KERNELS, SOFTMAX, text

SCALE = text("""
    def kernel(x, out, n, s):
        n = symbol(0, None)
        s = symbol(0, None)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in parallel((n + 63) // 64):
            for j in vector(min(-64*i + n, 64), lanes=4, copies=2):
                v0: f32 = x[64*i + j]
                v1: f32 = index(s)
                v2: f32 = mul(v0, v1)
                out[64*i + j] = v2
""")
RUN = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)


@functools.cache
def address(source):
    processor = host_processor()
    return load({"kernel": object_code(kernel_text(parse_kernel(source), processor, "kernel"), processor)})["kernel"]


def run(steps, slots, threads=1, together=()):
    words = (ctypes.c_int64 * (len(slots) + FAILURE_WORDS))(*slots)
    result = RUN(driver_address())(pack_steps(steps, len(slots), together), words, threads)
    return result, list(words)[-FAILURE_WORDS:]


def test_the_driver_runs_one_kernel_after_the_other():
    x, arena = torch.randn(100), torch.zeros(200)
    slots = [x.data_ptr(), arena.data_ptr(), 100]
    first = (address(SCALE), [(0, 0), (1, 0), (2, 0), (IMMEDIATE, 3)])
    second = (address(SCALE), [(1, 0), (1, 400), (2, -10), (IMMEDIATE, 2)])  # from one part of an arena to another
    for threads in (1, 2):
        assert run([first, second], slots, threads)[0] == 0
        assert torch.equal(arena[:100], x * 3)
        assert torch.equal(arena[100:190], x[:90] * 6)
        assert not arena[190:].any()
    assert run([], slots)[0] == 0


def test_the_driver_stops_at_a_failure_and_says_where():
    where, source, out = torch.tensor([1, 9, 2]), torch.randn(6), torch.zeros(3)
    slots = [where.data_ptr(), source.data_ptr(), out.data_ptr(), 3, source.data_ptr()]
    fine = (address(SCALE), [(1, 0), (2, 0), (IMMEDIATE, 1), (IMMEDIATE, 1)])
    wrong = (address(GATHER), [(0, 0), (1, 0), (2, 0), (3, 0)])
    late = (address(SCALE), [(1, 0), (4, 0), (IMMEDIATE, 6), (IMMEDIATE, 7)])
    kept = source.clone()
    assert run([fine, wrong, late], slots) == (1, [9, 6, 1])
    assert torch.equal(source, kept)  # the last kernel did not run
    with pytest.raises(ValueError, match="1100 arguments"):
        pack_steps([(0, [(0, 0)] * 1100)], 1)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_driver_stops_at_a_failure_of_a_team(threads):
    where, source, out = torch.tensor([1, 9, 2]), torch.randn(6), torch.zeros(9)
    slots = [where.data_ptr(), source.data_ptr(), out.data_ptr(), 3]
    fine = (address(SCALE), [(1, 0), (2, 0), (IMMEDIATE, 3), (IMMEDIATE, 1)])
    wrong = (address(GATHER), [(0, 0), (1, 0), (2, 12), (3, 0)])
    late = (address(SCALE), [(1, 0), (2, 24), (IMMEDIATE, 3), (IMMEDIATE, 7)])
    assert run([fine, fine, wrong, late], slots, threads, [(1, 2, 2)]) == (1, [9, 6, 2])
    assert not out[6:].any()


def test_object_code_can_be_kept_and_loaded_again():
    processor = host_processor()
    made = kernel_text(parse_kernel(SCALE), processor, "scale")
    code = object_code(made, processor)
    assert code == object_code(made, processor)  # nothing of it depends on the process
    both = load({"scale": code}), load({"scale": code})
    assert both[0]["scale"] != both[1]["scale"]
    x, out = torch.randn(7), torch.zeros(7)
    words = (ctypes.c_int64 * 4)(x.data_ptr(), out.data_ptr(), 7, 2)
    assert SIGNATURE(both[1]["scale"])(words, 1, (ctypes.c_int64 * 3)()) == 0
    assert torch.equal(out, x * 2)


def test_many_threads_compile_and_run_at_once():
    processor = host_processor()
    gate = threading.Barrier(4)

    def job(number):
        gate.wait()
        made = kernel_text(parse_kernel(SOFTMAX), processor, f"kernel{number}")
        function = SIGNATURE(load({f"kernel{number}": object_code(made, processor)})[f"kernel{number}"])
        x, out = torch.randn(5, 33), torch.zeros(5, 33)
        assert function((ctypes.c_int64 * 4)(x.data_ptr(), out.data_ptr(), 5, 33), 2, (ctypes.c_int64 * 3)()) == 0
        return float((out - x.softmax(1)).abs().max())

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(job, range(4))) < 1e-6


def test_text_that_is_wrong_is_an_error():
    with pytest.raises(RuntimeError, match="expected"):
        object_code("define i64 @f( {", host_processor())


def test_the_openmp_runtime_is_the_one_that_torch_uses():
    assert openmp_library() is not None
    assert set(PARALLEL) <= set(runtime_symbols())


def test_other_machines_use_their_vectors():
    source = SCALE.replace("lanes=4", "lanes=16")
    assert "ymm" in assembly(kernel_text(parse_kernel(source), AVX2, "kernel"), AVX2)
    assert "zmm" in assembly(kernel_text(parse_kernel(source), AVX512, "kernel"), AVX512)
    assert {target.lanes for target in PROCESSORS.values()} == {4, 8, 16}
    assert host_processor() is host_processor()


def test_coefficients_are_where_the_machine_wants_them():
    """An Arm core copies what it adds to; loading it anew is free. Others add from memory as they are."""
    kernel = parse_kernel(SOFTMAX)
    assert "load volatile <4 x float>" in kernel_text(kernel, PROCESSORS["portable-arm"], "kernel")
    assert "volatile" not in kernel_text(kernel, AVX2, "kernel")


def test_what_is_computed_by_portable_code_is_the_same(monkeypatch):
    """Conversions that a machine lacks are done by hand; this machine can run them too."""
    from ferrite.codegen.llvm import processor
    from tests import llvm_kernels

    by_hand = processor.Processor(**{**vars_of(host_processor()), "half": False})
    monkeypatch.setattr(llvm_kernels, "host_processor", lambda: by_hand)
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(-(1 << 31), 1 << 31, [500], generator=generator).to(torch.int32).view(torch.float32)
    edges = torch.tensor([0.0, 1.0, 65504.0, 65519.9, 65520.0, 1e9, 6e-8, 3e-8, 2.98e-8, 6.1e-5, 1.0004883])
    values = torch.cat([patterns, edges, -edges, torch.tensor([float("inf"), float("-inf"), float("nan")])])
    every = torch.arange(-(1 << 15), 1 << 15, 11).to(torch.int16).view(torch.float16)
    for given, dtype in ((values, torch.float16), (every, torch.float32)):
        source = text(f"""
            def kernel(x, out, n):
                n = symbol(0, None)
                x = pointer({short(given.dtype)}, 'read')
                out = pointer({short(dtype)}, 'write')
                for i in vector(n, lanes=4):
                    v0: {short(given.dtype)} = x[i]
                    v1: {short(dtype)} = cast(v0)
                    out[i] = v1
        """)
        source += "# by hand\n"
        assert_same(source, [given, torch.zeros(given.numel(), dtype=dtype)], [given.numel()])


def vars_of(target):
    return {name: getattr(target, name) for name in target.__dataclass_fields__}


def test_text_is_the_same_every_time():
    for source in KERNELS.values():
        kernel = parse_kernel(source)
        assert kernel_text(kernel, host_processor(), "k") == kernel_text(kernel, host_processor(), "k")


def test_steps_that_are_together_run_once_each_with_any_number_of_threads():
    """Between steps in turn: one before, which the shared ones read, and one after, which reads what they wrote."""
    size, count = 100, 40
    x, arena = torch.randn(size), torch.zeros(count + 2, size)
    slots = [x.data_ptr(), arena.data_ptr(), size]

    def scaled(source, target, factor):
        return address(SCALE), [source, (1, 4 * size * target), (2, 0), (IMMEDIATE, factor)]

    first = scaled((0, 0), 0, 2)
    shared = [scaled((1, 0), 1 + place, place) for place in range(count)]
    last = scaled((1, 4 * size * count), count + 1, 3)
    wanted = torch.stack([x * 2, *(x * 2 * place for place in range(count)), x * 2 * (count - 1) * 3])
    for threads, most in ((1, 8), (2, 8), (4, 8), (4, 2), (2, count)):
        arena.zero_()
        assert run([first, *shared, last], slots, threads, [(1, count, most)]) == (0, [0, 0, 0])
        assert torch.equal(arena, wanted)


def test_a_failure_behind_a_region_has_its_own_number():
    where, source, out = torch.tensor([1, 9, 2]), torch.randn(6), torch.zeros(4, 6)
    slots = [where.data_ptr(), source.data_ptr(), out.data_ptr(), 3]
    fine = [(address(SCALE), [(1, 0), (2, 24 * row), (IMMEDIATE, 6), (IMMEDIATE, 1)]) for row in range(3)]
    wrong = (address(GATHER), [(0, 0), (1, 0), (2, 72), (3, 0)])
    for threads in (1, 2):
        assert run([*fine, wrong], slots, threads, [(1, 2, 2)]) == (1, [9, 6, 3])
        assert torch.equal(out[:3], source.expand(3, 6))


def test_regions_are_filled_up_with_steps_in_turn():
    assert list(with_rest([(2, 3, 4), (5, 2, 2)], 9)) == [(0, 2, 1), (2, 3, 4), (5, 2, 2), (7, 2, 1)]
    assert list(with_rest([], 3)) == [(0, 3, 1)]
    assert list(with_rest([(0, 3, 2)], 3)) == [(0, 3, 2)]
    assert list(with_rest([], 0)) == []
