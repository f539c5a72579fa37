"""Images: object code that is loaded without a linker does what the linker's does."""

from __future__ import annotations

import ctypes
import struct

import pytest

from ferrite.codegen.llvm import image as images
from ferrite.codegen.llvm.build import load, object_code
from ferrite.codegen.llvm.emit import kernel_text
from ferrite.codegen.llvm.executable_memory import can_load, load_image
from ferrite.codegen.llvm.image import ARM, X86, Image, image_of, is_image
from ferrite.codegen.llvm.processor import AVX2, AVX512, PORTABLE_ARM, PORTABLE_X86, host_processor
from ferrite.errors import NotLoaded
from ferrite.ir.kernel.parse import parse_kernel
from tests.loop_kernels import KERNELS

needs_linux = pytest.mark.skipif(not can_load(), reason="images are for Linux")
UNARY = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)

# Constants in memory, a table that may be written, calls inside and outside.
EVERYTHING = """
@table = internal global [4 x double] [double 1.0, double 2.0, double 3.0, double 4.0], align 16
@counted = internal global i64 7, align 8
declare double @tgamma(double)
define internal double @inner(double %x) noinline {
  %two = fmul double %x, 1.2345678901234567
  ret double %two
}
define double @everything(double %x) {
  %near = call double @inner(double %x)
  %far = call double @tgamma(double %near)
  %index = fptoui double %x to i64
  %at = getelementptr [4 x double], ptr @table, i64 0, i64 %index
  %held = load double, ptr %at, align 8
  store double %far, ptr %at, align 8
  %count = load volatile i64, ptr @counted, align 8
  %more = add i64 %count, 1
  store volatile i64 %more, ptr @counted, align 8
  %number = uitofp i64 %more to double
  %sum = fadd double %held, %far
  %all = fadd double %sum, %number
  ret double %all
}
"""


@needs_linux
def test_an_image_does_what_the_linker_makes_of_the_object():
    code = object_code(EVERYTHING, host_processor())
    linked = UNARY(load({"everything": code})["everything"])
    held = Image.read(bytes(image_of(code)))
    kept = load_image("everything", held)
    loaded = UNARY(kept.address)
    values = [0.5, 1.25, 3.0, 0.5, 2.0, 0.0]  # what was written is read again
    assert [loaded(value) for value in values] == [linked(value) for value in values]
    assert held.fixed < len(held.code)


@needs_linux
def test_many_images_lie_side_by_side():
    texts = {
        f"f{number}": f"define double @f{number}(double %x) {{\n  %y = fmul double %x, {number}.1\n  ret double %y\n}}"
        for number in range(2, 5)
    }
    found = [load_image(name, image_of(object_code(text, host_processor()))) for name, text in texts.items()]
    assert [UNARY(each.address)(3.0) for each in found] == [3.0 * 2.1, 3.0 * 3.1, 3.0 * 4.1]


@pytest.mark.parametrize("target", [AVX2, AVX512, PORTABLE_X86, PORTABLE_ARM], ids=lambda target: target.name)
def test_every_kernel_has_an_image_on_every_machine(target):
    for kernel in KERNELS.values():
        image = image_of(object_code(kernel_text(parse_kernel(kernel), target, "kernel"), target))
        assert image.exports.keys() == {"kernel"}
        assert Image.read(bytes(image)) == image
        assert is_image(bytes(image))


@pytest.mark.quick
def test_a_function_that_is_not_there_is_named():
    image = Image(bytes(64), {"f": 0}, {"no_such_function": 8}, 64)
    with pytest.raises(RuntimeError, match="calls no_such_function, which is not in this process"):
        load_image("f", image)


@pytest.mark.quick
def test_what_is_no_object_for_a_known_machine_has_no_image():
    for data in (b"", b"MZ not an object", b"\x7fELF\x01\x01" + bytes(100), b"\x7fELF\x02\x01" + bytes(100)):
        with pytest.raises(NotLoaded):
            image_of(data)
    with pytest.raises(ValueError, match="cut short"):
        Image.read(bytes(Image(bytes(64), {"f": 0}, {}, 64))[:-1])


def test_memory_elsewhere_has_no_image():
    text = "@there = external global i32\ndefine i32 @f() {\n  %x = load i32, ptr @there\n  ret i32 %x\n}"
    for target in (AVX2, PORTABLE_ARM):
        with pytest.raises(NotLoaded):
            image_of(object_code(text, target))


# --- references -------------------------------------------------------------------------------------------------------


def filled(machine: int, kind: int, at: int, target: int, word: int = 0) -> int:
    code = bytearray(at) + struct.pack("<I", word)
    images.RULES[machine, kind](code, at, target)
    return struct.unpack_from("<I", code, at)[0]


@pytest.mark.quick
def test_references_are_written_as_the_machines_read_them():
    assert filled(X86, 2, 0x100, 0x200) == 0x100
    assert filled(X86, 4, 0x200, 0x100) == 0xFFFFFF00
    assert filled(ARM, 283, 0x100, 0x200, 0x94000000) == 0x94000040  # bl
    assert filled(ARM, 282, 0x200, 0x100, 0x14000000) == 0x17FFFFC0  # b
    assert filled(ARM, 275, 0x1FFC, 0x5010, 0x90000000) == 0x90000000 | 4 >> 2 << 5  # adrp, four pages on
    assert filled(ARM, 275, 0x3000, 0x2FFF, 0x90000000) == 0x90000000 | 3 << 29 | 0x7FFFF << 5  # one back
    assert filled(ARM, 277, 0, 0x5018, 0x91000000) == 0x91000000 | 0x18 << 10  # add
    assert filled(ARM, 299, 0, 0x5020, 0x3DC00000) == 0x3DC00000 | 2 << 10  # ldr of 16 bytes
    with pytest.raises(NotLoaded, match="not aligned"):
        filled(ARM, 299, 0, 0x5018)
    with pytest.raises(NotLoaded, match="too far"):
        filled(ARM, 283, 0, 1 << 28)
