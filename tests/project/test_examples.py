"""The programs in examples/: each runs in a process of its own, and prints what it says it shows."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed

from tests.fresh_process import FreshProcess, run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
ONE_THREAD = """
import runpy, sys, torch
torch.set_num_threads(1)  # tests run side by side
sys.path.insert(0, sys.argv[1].rpartition("/")[0])
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def printed_by(name, cwd):
    """What an example prints."""
    done = run_python("-c", ONE_THREAD, str(EXAMPLES / name), cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.quick
def test_the_list_has_every_example():
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))


def test_every_example_that_can_be_run_by_itself_says_how():
    for path in EXAMPLES.glob("*.py"):
        assert re.search(
            rf"^    (python|torchrun .*|python -m ferrite .*) examples/{path.name}", path.read_text(), re.M
        )


def test_look_inside(tmp_path):
    printed = printed_by("look_inside.py", tmp_path)
    assert len(re.findall(r"^batch of \d+: loss", printed, re.M)) == 3
    assert "kernels" in printed
    assert "run_0(" in printed  # the program that calls them


def test_train(tmp_path):
    printed = printed_by("train.py", tmp_path)
    losses = [(float(ours), float(eager)) for ours, eager in re.findall(r"^ +\d+ +([\d.]+) +([\d.]+)$", printed, re.M)]
    assert len(losses) == 6
    assert losses[-1][0] < 0.85 * losses[0][0]  # it learns
    assert all(abs(ours - eager) < 1e-3 for ours, eager in losses)
    kernels = re.search(r"^forward and backward: (\d+) kernels", printed, re.M)
    assert int(kernels[1]) > 20


def test_serve(tmp_path):
    printed = printed_by("serve.py", tmp_path)  # compares with eager by itself
    assert printed.count("ms a call") == 3
    assert "compilations: 1\nbatch norms left: 0" in printed
    assert "fold_conv_bn" in printed


def test_dynamic_shapes(tmp_path):
    printed = printed_by("dynamic_shapes.py", tmp_path)
    assert re.findall(r"(\d+) compilations$", printed, re.M) == ["4", "2", "1", "1"]
    assert re.search(r"\(s\d+, ", printed)  # a symbol among the arguments


def test_why_not_fused(tmp_path):
    printed = printed_by("why_not_fused.py", tmp_path)
    assert "exp and cumsum are in different kernels: one goes along memory, the other across" in printed
    assert "biased: addmm at add: fires" in printed
    assert "read_twice: addmm at add: mm has 2 uses, the pattern has 1" in printed


def test_own_pass(tmp_path):
    printed = printed_by("own_pass.py", tmp_path)  # compares with eager by itself
    assert re.search(r"^no pass +calls norms.rms_norm.default, norms.quantize.default$", printed, re.M)
    assert re.search(r"^a rule +calls norms.rms_norm_quantize.default$", printed, re.M)
    assert re.search(r"^Inductor's +calls norms.rms_norm_quantize.default$", printed, re.M)


@pytest.mark.slow
def test_bisect_a_bug(tmp_path):
    printed = printed_by("bisect_a_bug.py", tmp_path)
    assert "to blame: post_grad / square_is_absolute_value" in printed
    assert re.search(r"smallest graph +1 calls of \d+:\n *def forward\(self, h\):\n *mul = h \* h\n", printed)


STAGES = [
    "captured graph",
    "pre-grad, behind remove_noop_pass",
    "joint graph, captured",
    "post-grad",
    "loop program",
    "schedule, behind fuse",
    "kernel IR",
    "LLVM",
    "host program",
    "times",
]


def test_tour(tmp_path):
    printed = printed_by("tour.py", tmp_path)
    titles = re.findall(r"^=== (.*?) =+$", printed, re.M)
    assert [title for title in titles if title in STAGES] == STAGES
    assert re.search(r"^forward +kernel +\w+ +[\d.]+ us$", printed, re.M)
    assert re.search(r"^backward +kernel +\w+ +[\d.]+ us$", printed, re.M)
    (page,) = re.findall(r"^the page: (.*)$", printed, re.M)
    assert Path(page).read_text().startswith("<!doctype html>")
    shutil.rmtree(Path(page).parent)


ON_TWO_PROCESSES = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no torch.distributed with gloo",
)


def printed_by_two(name, folder):
    """What the first of two processes prints, as torchrun starts them, on the loopback."""
    place = folder / "meeting"
    code = ONE_THREAD.replace(
        "import runpy",
        "import os, torch.distributed as dist; begin, rank = dist.init_process_group, int(os.environ['RANK'])\n"
        f"dist.init_process_group = lambda kind: begin(kind, f'file://{place}', rank=rank, world_size=2)\nimport runpy",
    )
    both = {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        FreshProcess("-c", code, str(EXAMPLES / name), env={**os.environ, **both, "RANK": str(rank)}, cwd=folder)
        for rank in range(2)
    ]
    first, second = (rank.result() for rank in ranks)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    return first.stdout


def assert_losses_are_those_of_eager(printed):
    losses = re.findall(r"^step \d: loss ([\d.]+), in eager on one process ([\d.]+)$", printed, re.M)
    assert len(losses) == 4
    assert all(abs(float(ours) - float(eager)) < 1e-5 for ours, eager in losses)


@pytest.mark.slow
@ON_TWO_PROCESSES
def test_fsdp2(tmp_path):
    printed = printed_by_two("fsdp2.py", tmp_path)
    assert_losses_are_those_of_eager(printed)
    assert re.search(r"^forward, backward, forward, backward: [1-9]\d* kernels$", printed, re.M)


@pytest.mark.slow
@ON_TWO_PROCESSES
def test_tensor_parallel(tmp_path):
    printed = printed_by_two("tensor_parallel.py", tmp_path)
    assert_losses_are_those_of_eager(printed)
    counts = re.findall(r"^\w+: (\d+) collectives, (\d+) as products begin with parts$", printed, re.M)
    assert len(counts) == 2
    assert all(int(parts) > int(captured) > 0 for captured, parts in counts)
    assert "'micro_pipeline_all_gather'" in printed
    assert "'micro_pipeline_reduce_scatter'" in printed
