"""Code for GPUs: how arguments are passed, what is kept of a kernel, and that nothing is compiled twice."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec

import pytest
import torch

import ferrite
from ferrite.errors import Refusal
from ferrite.runtime.cuda import kernel_from, kernels
from ferrite.runtime.cuda.kernels import code_of, reason_to_refuse, scratch_parameters, unit_of
from tests.loop_kernels import KERNELS, text
from tests.targets.simulated_cuda import A100, H200
from tests.triton_kernels import kernel_of

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

FLAT = text("""
    def kernel(x, out):
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in vector(4096, lanes=4):
            v0: f32 = x[i]
            out[i] = v0
""")


@pytest.fixture
def nothing_known(monkeypatch):
    monkeypatch.setattr(kernels.KNOWN, "code", {})


def made(name):
    unit = unit_of(kernel_of(KERNELS[name]), H200)
    return kernel_from(code_of([unit])[unit.name])


def test_arguments_are_pointers_sizes_failures_and_two_pointers_of_tritons(nothing_known):
    """Of Triton 3.6 and 3.7: what is behind the arguments of the source is for scratch memory, and never used here."""
    kernel = made("gather")
    assert (kernel.pointers, kernel.sizes, kernel.checks, kernel.scratch) == (3, 1, True, 2)
    assert kernel.request["types"] == ["*i64", "*fp32", "*fp32", "i64", "*i64", "constexpr"]
    assert kernel.request["aligned"] == [0, 1, 2, 4]
    assert kernel.threads % 32 == 0
    assert kernel.programs is None  # sizes decide


def test_only_the_assembler_is_run(nothing_known, monkeypatch):
    """No C compiler, and no driver: there is none here."""
    ran = []
    kept = subprocess.Popen.__init__

    def popen(self, args, *more, **named):
        ran.append(args[0])
        kept(self, args, *more, **named)

    monkeypatch.setattr(subprocess.Popen, "__init__", popen)
    assert made("pointwise").code.startswith(b"\x7fELF")
    assert ran
    assert all("ptxas" in each for each in ran)


def test_a_version_that_passes_arguments_otherwise_is_refused():
    assert scratch_parameters(["*fp32", "i32", "constexpr"], ["u64", "u32", "u64", "u64"]) == 2
    assert scratch_parameters(["*fp32", "i64"], ["b64", "u64"]) == 0
    for found in (["u64"], ["u32", "u64"], ["u64", "u64", "u64"], ["u64", "u32", "u32"]):
        with pytest.raises(RuntimeError, match="this version of Triton"):
            scratch_parameters(["*fp32", "i32"], found)


def test_code_is_read_again_or_refused(nothing_known):
    unit = unit_of(kernel_of(KERNELS["pointwise"]), A100)
    code = code_of([unit])[unit.name]
    assert reason_to_refuse(unit.name, code) is None
    assert reason_to_refuse(unit.name, code.partition(b"\n")[0] + b"\nnothing") == Refusal("it holds no machine code")
    for broken in (b"{}\n", b""):
        refusal = reason_to_refuse(unit.name, broken)
        assert refusal is not None
        assert "Error" in refusal.reason


def test_code_without_promises_about_addresses(nothing_known):
    unit = unit_of(kernel_of(FLAT), H200)
    kernel = kernel_from(code_of([unit])[unit.name])
    assert kernel.programs == 4
    other = kernel.without([0])
    assert other.request["aligned"] == []
    assert other.code != kernel.code
    assert (other.pointers, other.sizes, other.programs) == (kernel.pointers, kernel.sizes, kernel.programs)


def test_what_is_in_the_cache_is_not_compiled_again(artifact_cache, nothing_known, monkeypatch):
    from tests.targets.simulated_cuda import SimulatedTarget

    target = SimulatedTarget()
    monkeypatch.setattr("ferrite.backend.targets_for", lambda options, devices: {"cpu": target})

    def function(x):
        return x.softmax(-1) * 2, (x + 1).sum(0)

    x = torch.randn(5, 7)
    for expected in ("miss", "hit"):
        found = torch.compile(function, backend="ferrite", options={"strict": True})(x)
        torch.testing.assert_close(found, function(x))
        assert [outcome.result for outcome in ferrite.last_compile().cache] == [expected]
        torch.compiler.reset()
        kernels.KNOWN.code.clear()
        monkeypatch.setattr(kernels, "answers", lambda requests: pytest.fail("compiled again") if requests else [])
    assert target.simulated.launched


def test_a_failed_check_is_an_assertion_of_the_device(nothing_known):
    """As in eager: the next call that waits for the GPU raises."""
    assert b"__assertfail" in made("gather").code
    assert b"__assertfail" not in made("pointwise").code
