"""`python -m ferrite replay`: every stage again from its dump, as it is and edited by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import ferrite
from ferrite.__main__ import main
from ferrite.cli.replay import STAGES as COMMAND_STAGES
from ferrite.diagnosis.replay import STAGES, kernels_in, replay
from ferrite.ir.program import parse
from tests.compare import compile_strict

pytestmark = [pytest.mark.quick, pytest.mark.lengthy]
BIAS = torch.tensor([1.0, 2.0, 3.0, 4.0])


def model(x, w):
    h = torch.tanh(x @ w + BIAS)
    return torch.softmax(h, -1).clone() * 3, h.sum(0)


def dumped(folder: Path, kind: str, **settings) -> Path:
    x, w = torch.randn(8, 16), torch.randn(16, 4, requires_grad=kind != "inference")
    grad = kind != "inference"
    with torch.set_grad_enabled(grad):
        outputs = compile_strict(model, options={"dump_dir": str(folder)}, **settings)(x, w)
        if grad:
            sum(each.sum() for each in outputs).backward()
    (found,) = folder.glob(f"*_{kind}")
    return found


@pytest.mark.parametrize("kind", ["inference", "forward", "backward"])
def test_every_stage_runs_again(kind, tmp_path):
    folder = dumped(tmp_path, kind)
    for stage in STAGES:
        found = replay(folder, stage)
        assert found.difference is None, f"{stage}: {found}"
        assert found.stage == stage
    made = replay(folder, "schedule").files
    assert parse(made["program.py"]) == parse((folder / "program.py").read_text())  # lines of the model are comments
    assert kernels_in(made["kernels.py"]) == kernels_in((folder / "kernels.py").read_text())
    without = [re.sub(r" +# .*", "", text) for text in (made["host.py"], (folder / "host.py").read_text())]
    assert without[0] == without[1]


def test_symbolic_sizes_are_replayed_at_those_seen(tmp_path):
    folder = dumped(tmp_path, "inference", dynamic=True)
    for stage in ("lower", "schedule", "load"):
        assert replay(folder, stage).difference is None


def test_a_graph_of_torch_calls_goes_through_the_whole_compiler(tmp_path):
    dumped(tmp_path, "forward")
    (folder,) = tmp_path.glob("*_torch")
    assert replay(folder).difference is None


def edited(path: Path, old: str, new: str, into: Path) -> Path:
    text = path.read_text()
    assert old in text
    into.write_text(text.replace(old, new))
    return into


@pytest.mark.parametrize(
    ("name", "old", "new", "stage"),
    [
        ("00_captured.py", ", 3)", ", 4)", "captured"),
        ("program.py", "3.0", "4.0", "schedule"),
        ("kernels.py", "3.0", "4.0", "codegen"),
    ],
)
def test_what_was_edited_by_hand_is_run(name, old, new, stage, tmp_path, capsys):
    folder = dumped(tmp_path / "dump", "inference")
    file = edited(folder / name, old, new, tmp_path / name)
    if name == "00_captured.py":  # the program is what it was before
        assert replay(folder, "schedule", {name: file}).difference.startswith("output 0: off by")
        return
    assert main(["replay", str(folder), "--replace", str(file), "--into", str(tmp_path / "made")]) == 1
    assert f"from {stage}: differs: output 0: off by" in capsys.readouterr().out
    assert new in (tmp_path / "made" / "kernels.py").read_text()


def test_a_kernel_can_be_another_text(tmp_path, capsys):
    folder = dumped(tmp_path / "dump", "inference")
    number, text = next(
        (path.name, path.read_text()) for path in sorted(folder.glob("kernel_*.ll")) if "fmul" in path.read_text()
    )
    file = tmp_path / "mine.ll"
    file.write_text(text.replace(" fmul ", " fadd "))
    assert main(["replay", str(folder), "--replace", f"{number}={file}"]) == 1
    assert "from load: differs" in capsys.readouterr().out
    assert main(["replay", str(folder), "--from", "load"]) == 0


def test_the_record_says_how_to_repeat_a_run(tmp_path):
    dumped(tmp_path, "inference")
    record = ferrite.last_compile()
    rows = record.to_repeat.splitlines()
    assert rows[0].startswith(f"ferrite {ferrite.__version__}, torch {torch.__version__}, python ")
    commands = [row for row in rows if row.startswith("python -m ferrite replay ")]
    assert [row.split()[-1] for row in commands] == [str(path) for path in sorted(tmp_path.iterdir())]
    compile_strict(torch.cos, options={"numerics": "strict"})(torch.ones(3))
    assert "'numerics': 'strict'" in ferrite.last_compile().to_repeat
    assert ferrite.last_compile().to_repeat.endswith("FERRITE_DUMP=dir keeps what every stage was given")
    assert "dynamic=True" not in ferrite.last_compile().to_repeat
    compile_strict(torch.cos, dynamic=True)(torch.ones(3))
    assert "with sizes that may vary: dynamic=True" in ferrite.last_compile().to_repeat


def test_a_whole_dump_is_replayed_graph_by_graph(tmp_path, capsys):
    folder = dumped(tmp_path / "dump", "forward")
    assert main(["replay", str(folder.parent), "--from", "schedule", "--into", str(tmp_path / "made")]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.partition(":")[0].partition("_")[2] for row in rows] == ["forward", "backward"]
    assert all("from schedule: the same as the captured graph in eager" in row for row in rows)
    assert (tmp_path / "made" / folder.name / "host.py").is_file()
    file = edited(folder / "kernels.py", "3.0", "4.0", tmp_path / "kernels.py")
    assert main(["replay", str(folder.parent), "--replace", str(file)]) == 2  # which of them?
    assert f"name one folder: {folder.name}, " in capsys.readouterr().err


def test_bad_input_is_explained(tmp_path, capsys):
    folder = dumped(tmp_path, "inference")
    assert main(["replay", str(folder.parent / "nothing")]) == 2
    assert "FERRITE_DUMP=dir" in capsys.readouterr().err
    other = tmp_path / "progam.py"
    other.write_text("")
    assert main(["replay", str(folder), "--replace", str(other)]) == 2
    assert f"to say which    --replace program.py={other}" in capsys.readouterr().err
    assert json.loads((folder / "replay.json").read_text())["kind"] == "inference"
    assert COMMAND_STAGES == STAGES
