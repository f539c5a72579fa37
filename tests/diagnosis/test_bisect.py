"""`python -m ferrite bisect`: planted bugs are found by one command, with the smallest graph that shows each."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

import ferrite
from ferrite.diagnosis.bisect.search import first_bad
from ferrite.diagnosis.bisect.shrink import GraphSource, Statement, resized, taken_apart, with_size
from ferrite.options import Options
from tests.compare import compile_strict
from tests.fresh_process import FreshProcess, run_python

ROOT = Path(__file__).parents[2]
MODEL = ["f32[16,24]", "f32[24,32]", "f32[32]"]
PLANT = """
import sys
sys.path.insert(0, {root!r})
from tests.diagnosis import planted
planted.{bug}()
model = planted.model
"""
COMMAND = """
import sys
from ferrite.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def ferrite_command(*arguments: str, cwd: Path) -> str:
    """What `python -m ferrite ...` prints, and that it found something."""
    done = run_python("-c", COMMAND, *arguments, cwd=cwd)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def found_in(folder: Path) -> tuple[dict, str]:
    (found,) = (folder / "bisected").iterdir()
    return json.loads((found / "about.json").read_text()), (found / "graph.py").read_text()


@pytest.mark.parametrize(
    ("bug", "kind", "name", "smallest"),
    [
        ("wrong_rule", "wrong", r"post_grad / pass_patterns / addmm", r"= \w+ @ \w+\n *\w+ = \w+ \+ \w+\n *return"),
        pytest.param("wrong_fusion", "wrong", r"schedule / fuse", r"return", marks=pytest.mark.slow),
        pytest.param(
            "wrong_kernel", "wrong", r"lower / kernel tanh", r"torch\.tanh\(\w+\)\n *return", marks=pytest.mark.slow
        ),
        pytest.param(
            "slow_kernel", "slow", r"lower / kernel tanh", r"torch\.tanh\(\w+\)\n *return", marks=pytest.mark.slow
        ),
        pytest.param(
            "crashing_kernel", "crash", r"lower / kernel tanh", r"torch\.tanh\(\w+\)\n *return", marks=pytest.mark.slow
        ),
    ],
)
def test_a_planted_bug_is_found_by_one_command(bug, kind, name, smallest, tmp_path):
    (tmp_path / "net.py").write_text(PLANT.format(root=str(ROOT), bug=bug))
    printed = ferrite_command("bisect", "net.py:model", *MODEL, *(["--slow"] * (kind == "slow")), cwd=tmp_path)
    assert re.search(f"to blame: {name}", printed), printed
    about, graph = found_in(tmp_path)
    assert about["kind"] == kind
    assert re.search(smallest, graph), graph
    assert len(re.findall(r"^        \w+ = ", graph, re.MULTILINE)) <= 2  # calls
    sizes = [
        int(size) for shape in re.findall(r"shape=\(([^)]*)\)", graph) for size in shape.split(",") if size.strip()
    ]
    assert kind == "slow" or max(sizes) <= 4
    assert "planted.py" in about["line"]
    if bug == "wrong_kernel":
        assert "its loop program is right, its code is not" in printed
    if bug == "wrong_fusion":
        assert re.search(r"where +group on cpu over .* rows: ", printed), printed


@pytest.mark.slow
def test_a_folder_of_a_failed_stage_is_narrowed_down_by_the_command_that_the_message_names(tmp_path):
    options = {"fail_at": "lower", "repro_dir": str(tmp_path / "repro"), "strict": True}
    with pytest.raises(ferrite.CompilerBug) as caught:
        torch.compile(lambda x: x.sin().cos(), backend="ferrite", options=options)(torch.ones(3))
    command = caught.value.lines["to narrow it"].split()
    assert command[:4] == ["python", "-m", "ferrite", "bisect"]
    printed = ferrite_command(*command[3:], cwd=tmp_path)
    assert "error: RuntimeError: asked to fail at 'lower'" in printed
    about, _graph = found_in(tmp_path)
    assert about["kind"] == "error"


@pytest.mark.slow
def test_of_several_graphs_the_one_to_blame_is_found(tmp_path):
    check = PLANT.format(root=str(ROOT), bug="wrong_kernel") + CHECK
    (tmp_path / "net.py").write_text(check)
    printed = ferrite_command("bisect", "net.py:check", cwd=tmp_path)
    assert "graph 1 of 3" in printed
    assert "to blame: lower / kernel tanh" in printed


CHECK = """
import torch

def parts(x):
    x = x.sin() + 1
    torch._dynamo.graph_break()
    x = torch.tanh(x) * 2
    torch._dynamo.graph_break()
    return x.exp().sum()

def check():
    x = torch.randn(64)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(parts, backend="ferrite")(x), parts(x))
"""


@pytest.mark.slow
def test_the_search_can_be_stopped_from_the_keyboard(tmp_path):
    (tmp_path / "net.py").write_text(
        "import time\n\ndef check():\n    open('began', 'w').close()\n    time.sleep(100)\n"
    )
    begin = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{COMMAND}"
    process = FreshProcess("-c", begin, "bisect", "net.py:check", cwd=tmp_path)
    while not (tmp_path / "began").exists():
        assert process.process.exitcode is None
        time.sleep(0.1)
    os.kill(process.process.pid, signal.SIGINT)
    done = process.result(timeout=50)  # and no child of it goes on
    assert done.returncode == 130
    assert "stopped: what is known so far stands above" in done.stdout


@pytest.mark.quick
def test_a_pass_of_the_users_is_written_down_as_what_makes_it_again():
    @ferrite.graph_pass
    def mine(gm):
        return 0

    @ferrite.graph_pass
    def with_context(gm, context):
        return 0

    written = Options(passes=(mine, with_context)).changed()["passes"]
    where = "test_a_pass_of_the_users_is_written_down_as_what_makes_it_again.<locals>"
    assert written == [f"{__name__}:{where}.{name}" for name in ("mine", "with_context")]


@pytest.mark.slow
def test_nothing_is_found_where_nothing_is_wrong(tmp_path):
    (tmp_path / "net.py").write_text("import torch\n\ndef good(x):\n    return x.sin()\n\ndef bad(): assert False\n")
    done = run_python("-c", COMMAND, "bisect", "net.py:good", "f32[3]", cwd=tmp_path)
    assert (done.returncode, done.stdout.split("\n")[0]) == (0, "the check passes")
    done = run_python("-c", COMMAND, "bisect", "net.py:bad", cwd=tmp_path)
    assert done.stdout.startswith("the check fails without ferrite too")


# --- its parts --------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_halving_finds_the_first():
    for guilty in range(1, 20):
        asked = []
        assert first_bad(19, lambda place: asked.append(place) or place >= guilty) == guilty  # noqa: B023
        assert len(asked) <= 5


def test_fuel_of_one_stage_counts_over_both_graphs_and_leaves_other_stages_alone():
    def model(x, w):
        return torch.tanh(x.sin() @ w).cos().sum()

    def run(**options):
        torch.compiler.reset()
        w = torch.randn(4, 4, requires_grad=True)
        compile_strict(model, options=options)(torch.randn(4, 4), w).backward()
        return ferrite.last_compile()

    everything = run()
    assert everything.eager_calls
    none = run(fuel=0, fuel_stage="lower")
    assert not none.kernels
    assert {call.reason for call in none.eager_calls} >= {"out of fuel"}
    forward_only = run(fuel=3, fuel_stage="lower")
    assert [bool(graph.kernels) for graph in forward_only.graphs] == [True, False]
    assert len(run(fuel=0, fuel_stage="schedule").kernels) > len(everything.kernels)


@pytest.mark.quick
def test_only_graphs_that_are_named_are_compiled():
    compile_strict(lambda x: x.cos())(torch.ones(3))
    start = ferrite.last_compile().number + 1
    compiled = compile_strict(lambda x: x.sin() + 1, options={"graphs": str(start + 1)})
    compiled(torch.ones(3))
    assert not ferrite.last_compile().graphs
    torch.compiler.reset()
    compiled(torch.ones(3))
    assert len(ferrite.last_compile().graphs) == 1
    with pytest.raises(ferrite.UserError, match="option 'graphs' is '1-x'"):
        Options(graphs="1-x")


SOURCE = """from ferrite.debug.repro import missing, stand_in
import torch


class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = stand_in(shape=(8, 1), stride=(1, 1), dtype=torch.float32, device='cpu')
        self.other = missing('nothing')

    def forward(self, l_x_ : torch.Tensor):
        l_x_ = l_x_
        sin = torch.sin(l_x_);  l_x_ = None
        scale = self.scale
        mul = sin * scale;  sin = scale = None
        sum_1 = mul.sum(8);  mul = None
        return (sum_1,)


def make_inputs():
    return [
        stand_in(shape=(8, 8), stride=(8, 1), dtype=torch.float32, device='cpu'),
    ]
"""


@pytest.mark.quick
def test_any_part_of_a_graph_is_a_graph():
    looks = "stand_in(shape=(8, 8), stride=(8, 1), dtype=torch.float32, device='cpu')"
    graph = taken_apart(SOURCE.replace("        l_x_ = l_x_\n", ""), {"l_x_": looks, "sin": looks, "mul": looks})
    assert [each.name for each in graph.statements] == ["sin", "scale", "mul", "sum_1"]
    part = GraphSource(**{**vars(graph), "statements": graph.statements[1:3]})
    text = part.text()
    assert "def forward(self, sin):" in text
    assert "return (mul, )" in text  # what was left out reads it
    assert "self.scale = " in text
    assert "missing(" not in text  # nobody reads it
    assert graph.statements[0] == Statement("sin", "torch.sin(l_x_)", frozenset({"l_x_"}))
    smaller = with_size(graph, 8, 2)
    assert smaller.values["sin"].startswith("stand_in(shape=(2, 2), stride=(2, 1)")
    assert smaller.statements[-1].text == "mul.sum(2)"
    assert "shape=(2, 1)" in smaller.text()


@pytest.mark.quick
def test_smaller_tensors_lie_as_before():
    assert (
        resized("stand_in(shape=(6, 4), stride=(1, 6), dtype=d)", 6, 3)
        == "stand_in(shape=(3, 4), stride=(1, 3), dtype=d)"
    )
    assert (
        resized("stand_in(shape=(6, 4), stride=(0, 1), dtype=d)", 4, 2)
        == "stand_in(shape=(6, 2), stride=(0, 1), dtype=d)"
    )
