"""What a loop reads from another device is copied to its own first."""

from __future__ import annotations

from dataclasses import replace

import torch

from ferrite.ir import data, op
from ferrite.ir.program import Compute, DeviceCopy, Store, reads, verify_program
from ferrite.lower.device_operands import with_operands_beside
from tests.loop_programs import I64, at, buffer, i0, program

GPU = torch.device("cuda:0")


def on_gpu(made):
    return replace(made, device=GPU)


def times_scale(target, source):
    return Compute((i0,), (Store(target, (i0,), op("mul", at(source, i0), at("scale"))),))


def with_scale(*operations, last="out"):
    buffers = [on_gpu(buffer("x", 8, kind="input")), buffer("scale", kind="input")]
    buffers += [on_gpu(buffer(name, 8)) for name in ("mid", "out")]
    return verify_program(program(*operations, buffers=buffers, outputs=(last,), inputs=("x", "scale")))


def test_a_number_is_copied_once_for_all_that_read_it():
    found = verify_program(with_operands_beside(with_scale(times_scale("mid", "x"), times_scale("out", "mid"))))
    copy, first, second = found.operations
    assert isinstance(copy, DeviceCopy)
    assert copy.source == "scale"
    assert next(each for each in found.buffers if each.name == copy.target).device == GPU
    assert {access.buffer for access in reads(first)} == {"x", copy.target}
    assert {access.buffer for access in reads(second)} == {"mid", copy.target}


def test_what_was_written_in_between_is_copied_again():
    write = Compute((), (Store("scale", (), op("neg", at("scale"))),))
    found = with_operands_beside(with_scale(times_scale("mid", "x"), write, times_scale("out", "mid")))
    kinds = [type(each) for each in verify_program(found).operations]
    assert kinds == [DeviceCopy, Compute, Compute, DeviceCopy, Compute]
    assert {access.buffer for access in reads(found.operations[2])} == {"scale"}  # a loop on the CPU


def test_indices_are_copied_too():
    place = data(at("where", i0, dtype=I64), i0.extent)
    gather = Compute((i0,), (Store("out", (i0,), at("x", place)),))
    scatter = Compute((i0,), (Store("mid", (place,), at("x", i0)),))
    buffers = [on_gpu(buffer(name, 8)) for name in ("mid", "out")]
    buffers += [on_gpu(buffer("x", 8, kind="input")), buffer("where", 8, dtype=I64, kind="input")]
    given = program(gather, scatter, buffers=buffers, outputs=("out", "mid"), inputs=("x", "where"))
    copy, *loops = with_operands_beside(given).operations
    assert isinstance(copy, DeviceCopy)
    for loop in loops:
        assert {access.buffer for access in reads(loop)} == {"x", copy.target}


def test_a_program_on_one_device_stays_as_it_is():
    given = with_scale(times_scale("out", "x"))
    alone = replace(given, buffers=tuple(map(on_gpu, given.buffers)))
    assert with_operands_beside(alone) is alone
    cpu = replace(given, buffers=tuple(replace(each, device=torch.device("cpu")) for each in given.buffers))
    assert with_operands_beside(cpu) is cpu
