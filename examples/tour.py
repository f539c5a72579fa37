"""One function through every stage of the compiler, each printed: read it from top to bottom, like a notebook.

    python examples/tour.py

The cells (`# %%`) run one by one in editors that know them. The option `dump_dir` writes every stage into a folder;
this program opens one file after the other.
"""

# %% A function, its gradients, and a folder for what becomes of it

import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import ferrite

folder = Path(tempfile.mkdtemp(prefix="tour-"))


def model(x, weight, bias):
    h = F.gelu(x.clone() @ weight + bias)
    centred = h - h.mean(-1, keepdim=True)
    return centred.square().mean()


def show(title, text, lines=30):
    """Print the first lines of a stage."""
    rows = text.strip().splitlines()
    print(f"\n=== {title} {'=' * (100 - len(title))}\n")
    print("\n".join(rows[:lines]))
    if len(rows) > lines:
        print(f"... {len(rows) - lines} more lines")


def graph_in(path):
    """What a graph computes: the body of `forward` in a file that runs by itself."""
    return path.read_text().partition("def forward(")[2].partition("\n\n")[0]


x = torch.randn(64, 256)
weight, bias = torch.randn(256, 128, requires_grad=True), torch.randn(128, requires_grad=True)

compiled = ferrite.compile(model, dump_dir=folder, report=folder / "page.html", measure=True, strict=True)
for _ in range(5):
    compiled(x, weight, bias).backward()
record = ferrite.last_compile()
stages = {path.name.partition("_")[2]: path for path in sorted(folder.glob("[0-9]*_*"))}

# %% What Dynamo captured: the calls of torch, as the program made them

captured, *later = sorted(stages["torch"].glob("[0-9]*.py"))
show("captured graph", graph_in(captured))

# %% The pre-grad passes work on these calls; a file for each that changed something

for path in later:
    show(f"pre-grad, behind {path.stem.partition('_')[2]}", graph_in(path))
print("rewrites:", {each.name: dict(each.rewrites) for each in record.passes["pre_grad"] if each.rewrites})

# %% Forward and backward as one graph of ATen operators, and what the joint passes made of it

for path in sorted(stages["joint"].glob("[0-9]*.py")):
    show(f"joint graph, {path.stem.partition('_')[2]}", graph_in(path), 12)

# %% The joint graph is cut in two: what forward keeps for backward, and what backward computes again

print(f"\nkept for backward: {record.saved.values} values, {record.saved.bytes} bytes beyond the inputs")
print("computed again:", ", ".join(each.operator for each in record.saved.recomputed) or "nothing")

# %% The forward graph behind the post-grad passes

show("post-grad", graph_in(sorted(stages["forward"].glob("[0-9]*.py"))[-1]))

# %% The loop program: what is computed at each point, and nothing about when or where

show("loop program", (stages["forward"] / "program.py").read_text(), 40)

# %% The schedule: which operations become one kernel, and where results lie

for step in ("prepare", "fuse", "finish"):
    (path,) = stages["forward"].glob(f"*_{step}.txt")
    show(f"schedule, behind {step}", path.read_text())

# %% The kernels: loops in their order, threads and vectors

show("kernel IR", (stages["forward"] / "kernels.py").read_text(), 40)

# %% What LLVM gets

code = (stages["forward"] / "kernel_0.ll").read_text()
show("LLVM", code[code.index("define") :])

# %% The host program: it allocates, calls torch, runs the kernels, and frees

show("host program", (stages["forward"] / "host.py").read_text())

# %% Times: of the stages, and of every kernel and call of torch

show("times", "\n".join(f"{name:<10} {seconds * 1e3:8.1f} ms" for name, seconds in record.stages.items()))
told = json.loads(ferrite.report(folder / "record.json").read_text())
for graph in told["compiles"][-1]["graphs"]:
    for step in graph["steps"]:
        print(f"{graph['kind']:<9} {step['kind']:<9} {step['title']:<40} {step['seconds'] * 1e6:8.1f} us")

# %% And all of it as a page

print(f"\nthe page: {ferrite.report(folder / 'page.html')}")
