"""FERRITE_DUMP: graphs as Python that runs by itself, one file per pass that changed something."""

from __future__ import annotations

import pytest
import torch

import ferrite
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.ir.program.parse import parse
from ferrite.schedule.plan import STEPS
from tests.compare import compile_strict
from tests.fresh_process import run_python


def model(x, w, b):
    return (torch.mm(x, w).add(b).clone() + 1).sum()


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_step_is_written_and_runs(tmp_path, dynamic):
    x, w, b = torch.ones(2, 3), torch.ones(3, 4, requires_grad=True), torch.ones(4)
    options = {"dump_dir": str(tmp_path), "pre_grad": False, "joint": False}
    compile_strict(model, options=options, dynamic=dynamic)(x, w, b).backward()
    forward, backward = sorted(tmp_path.iterdir())
    assert forward.name.endswith("_forward")
    assert backward.name.endswith("_backward")
    names = sorted(path.name for path in forward.iterdir())
    assert [name.split("_", 1)[-1] for name in names] == [
        "captured.py",
        "remove_noop_ops.py",
        "pass_patterns.py",
        *(f"{step.__name__}.txt" for step in STEPS),
        "accesses.txt",
        "host.py",
        *(f"{number}.ll" for number in range(len(list(forward.glob("kernel_*.ll"))))),
        "kernels.py",
        "objects.json",
        "program.py",
        "replay.json",
    ]
    assert "define i64 @kernel_" in (forward / "kernel_0.ll").read_text()
    assert parse((forward / "program.py").read_text()).name == "forward"
    assert (forward / "host.py").read_text() == ferrite.last_compile().graphs[0].source
    assert "clone" in (forward / names[0]).read_text()
    assert "clone" not in (forward / names[1]).read_text()
    assert "addmm" in (forward / names[2]).read_text()
    done = run_python(str(forward / names[1]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(tensor(")


def test_kernels_are_written_each_once_and_read_back(tmp_path):
    def twice_and_another(x, y, w):
        return torch.softmax(x @ w, -1), torch.softmax(y @ w, -1), w.cumsum(0)

    with torch.no_grad():
        inputs = [torch.randn(8, 16), torch.randn(8, 16), torch.randn(16, 16)]
        compile_strict(twice_and_another, options={"dump_dir": str(tmp_path)})(*inputs)
    (text,) = (path.read_text() for path in tmp_path.rglob("kernels.py"))
    assert "symbol" not in text
    heads, kernels = zip(*(part.split("\n", 1) for part in text.split("# kernel ")[1:]), strict=True)
    assert [head.split(":")[0] for head in heads] == [f"{number} on cpu" for number in range(len(heads))]
    assert (len(kernels), len(ferrite.last_compile().kernels)) == (2, 3)
    for kernel in kernels:  # where it came from is a comment, and no part of it
        assert str(parse_kernel(kernel)).strip() == kernel[kernel.index("def kernel") :].strip()


def test_a_graph_without_kernels_says_so(tmp_path):
    with torch.no_grad():
        options = {"dump_dir": str(tmp_path), "executor": "calls"}
        compile_strict(lambda x: x + 1, options=options)(torch.ones(3))
    (text,) = (path.read_text() for path in tmp_path.rglob("kernels.py"))
    assert text == "# no kernels\n"


def test_every_stage_has_a_folder(tmp_path):
    x, w, b = torch.ones(2, 3), torch.ones(3, 4, requires_grad=True), torch.ones(4)
    compile_strict(model, options={"dump_dir": str(tmp_path)})(x, w, b).backward()
    folders = sorted(tmp_path.iterdir())
    assert [folder.name.split("_")[1] for folder in folders] == ["torch", "joint", "forward", "backward"]
    written = {path.name: path.read_text() for path in folders[0].iterdir()}
    assert "clone" in written["00_captured.py"]
    (without,) = (text for name, text in written.items() if name.endswith("remove_noop_pass.py"))
    assert "clone" not in without


@pytest.mark.quick
def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    compiled = compile_strict(lambda x: x + 1, options={"dump_dir": str(blocked)})
    with pytest.warns(ferrite.FerriteWarning, match="could not write") as caught:
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert len(caught) == 1
