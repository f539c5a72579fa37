"""The laws of host programs: each broken once, and what the user sees when a stage breaks one."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from ferrite.codegen.host.laws import HELPERS, verify_host
from ferrite.codegen.host.printer import print_host
from ferrite.codegen.host.source import HostSource
from ferrite.errors import FerriteWarning
from ferrite.ir.invalid import InvalidProgram
from ferrite.runtime import host_program as runtime
from tests.compare import reset

quick = pytest.mark.quick
GOOD = """\
def inference(args):
    (s0, x, w,) = args
    args.clear()
    y = op_aten_mm(x, w)
    if y.stride() != (s0, 1): y = laid_out(y, (s0, 1))
    del x, w
    u0 = y.size(0)
    if not (u0 >= 2):
        raise RuntimeError("u9 is read nowhere, and 'x' neither")
    # kernels 0 to 3 of run_0: together, one thread each
    z = empty_strided((u0, 4), (4, 1), dtype=torch.float32, device='cpu')
    a, b, *_ = leaves(op_aten_mm(y, constant)); del _
    run_0(threads(), y.data_ptr(), z.data_ptr(), u0)
    return [z, a, b, s0 // 2]
"""


def source(text: str) -> HostSource:
    made = HostSource("inference", text, operators={"op_aten_mm": "aten.mm.default"})
    made.runs.append(None)
    return made


@quick
def test_a_program_that_keeps_every_law():
    assert verify_host(source(GOOD), ["constant"]).text == GOOD


@quick
@pytest.mark.parametrize(
    ("old", "new", "law"),
    [
        ("    u0 = y.size(0)\n", "", "H2: u0 is read, but not bound"),
        ("    y = op_aten_mm(x, w)\n", "    del x\n    y = op_aten_mm(x, w)\n", "H1: x is read after it is freed"),
        ("    del x, w\n", "    del x, v\n", "H3: v is freed, but not bound"),
        ("    del x, w\n", "    del x, x\n", "H3: x is freed, but not bound"),
        ("    u0 = y.size(0)\n", "    if s0 == 1: u0 = y.size(0)\n", "H2: u0 is read, but not bound"),
        ("run_0(threads()", "run_1(threads()", "H2: run_1 is read, but not bound"),
        ("op_aten_mm(y, constant)", "op_aten_mm(y, other)", "H2: other is read, but not bound"),
        ("(s0, 1): y", "(s1, 1): y", "H2: s1 is read, but not bound"),
        ("dtype=torch.float32", "dtype=kind", "H2: kind is read, but not bound"),
        ("s0 // 2", "s2 // 2", "H2: s2 is read, but not bound"),
    ],
)
def test_a_broken_law_is_found(old, new, law):
    assert old in GOOD
    with pytest.raises(InvalidProgram, match=law):
        verify_host(source(GOOD.replace(old, new)), ["constant"])


@quick
def test_names_of_one_function_are_not_known_in_another():
    text = "def inner(args):\n    (x,) = args\n    return [x]\n\n" + GOOD.replace("[z, a", "inner([x]) + [z, a")
    with pytest.raises(InvalidProgram, match="H1: x is read after it is freed"):
        verify_host(source(text), ["constant"])


@quick
def test_the_runtime_has_every_helper():
    text = Path(runtime.__file__).read_text()
    assert all(f'"{name}": ' in text for name in HELPERS)


def test_a_program_that_breaks_a_law_is_never_called(monkeypatch, tmp_path):
    """It runs in eager, with the usual warning."""

    def broken(*args):
        source = print_host(*args)
        source.text = source.text.replace("return [", "return [nobody, ")
        return source

    monkeypatch.setattr("ferrite.targets.executable.print_host", broken)
    monkeypatch.setenv("FERRITE_REPRO_DIR", str(tmp_path))
    reset()
    x = torch.randn(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FerriteWarning)
        assert torch.equal(torch.compile(lambda x: x * 2 + 1, backend="ferrite")(x), x * 2 + 1)
    (said,) = [str(each.message) for each in caught if issubclass(each.category, FerriteWarning)]
    assert "law H2: nobody is read, but not bound" in said
