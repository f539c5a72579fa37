"""The layers of the design: imports run one way, private torch APIs have one door, importing is cheap."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ferrite.collector import garbage_waits

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ferrite"

# Layers from the bottom up: each may import what stands before it, and itself; those of one layer know nothing of each
# other.
LAYERS = [
    {"collector", "errors"},
    {"graph", "options", "tune"},
    {"capture", "ir", "machines"},
    {"pipeline"},
    {"rewrite", "schedule"},
    {"codegen", "lower", "passes"},
    {"cache", "runtime"},
    {"debug", "targets"},
    {"backend", "reports"},
    {"api"},
    {"diagnosis"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@functools.cache
def names_in(path: Path) -> list[ast.Import | ast.ImportFrom | ast.Attribute]:
    """What tests look at, of every file: imports, and attributes that are private. Names in functions come last."""
    return [*names_outside_of_functions(path), *names_by_place(path)[1]]


def names_outside_of_functions(path: Path) -> list[ast.Import | ast.ImportFrom | ast.Attribute]:
    return names_by_place(path)[0]


@functools.cache
def names_by_place(path: Path) -> tuple[list[Any], list[Any]]:
    """Names outside of functions, and those inside of them."""
    outside: list[Any] = []
    inside: list[Any] = []
    with garbage_waits():  # half a million nodes, and the collector would look through all of them again and again
        left: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), False)]
        while left:
            node, is_inside = left.pop()
            is_import = isinstance(node, (ast.Import, ast.ImportFrom))
            if is_import or (isinstance(node, ast.Attribute) and node.attr.startswith("_")):
                (inside if is_inside else outside).append(node)
            is_inside = is_inside or isinstance(node, ast.FunctionDef)
            left += [(child, is_inside) for child in ast.iter_child_nodes(node)]
    return outside, inside


def imported(path: Path) -> list[tuple[str, int]]:
    """Every dotted name a file imports, at any depth in it, with its line; `from a import b` counts as a.b."""
    found = []
    for node in names_in(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


@pytest.mark.quick
def test_every_package_has_a_layer():
    assert {layer_of(path) for path in modules()} - {"__init__"} == set(RANK)


@pytest.mark.quick
def test_imports_run_one_way():
    wrong = []
    for path in modules():
        if path == PACKAGE / "__init__.py":
            continue  # the front door names what lies behind it
        for name, line in imported(path):
            parts = name.split(".")
            other, own = parts[1] if parts[0] == "ferrite" and len(parts) > 1 else "", layer_of(path)
            if other != own and RANK.get(other, -1) >= RANK[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong


@pytest.mark.quick
def test_nothing_below_what_a_user_calls_asks_the_root_for_more_than_its_version():
    """`import ferrite` in a function would be a way back up."""
    wrong = []
    for path in modules():
        if RANK.get(layer_of(path), len(RANK)) >= RANK["api"] or "import ferrite\n" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ferrite":
                wrong += [f"{path.relative_to(ROOT)}:{node.lineno} asks for {node.attr}"] * (node.attr != "__version__")
    assert not wrong


# Packages inside of packages that have front doors of their own.
INNER = "ir.program ir.kernel codegen.host codegen.llvm codegen.triton runtime.cpu runtime.cuda schedule.cpu"
INNER += " schedule.gpu schedule.fusion schedule.loops schedule.memory passes.freezing passes.joint passes.post_grad"
INNER += " passes.pre_grad diagnosis.bisect"
INNER_DOORS = {f"ferrite.{name}" for name in INNER.split()}


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


@pytest.mark.quick
def test_imports_across_packages_go_through_front_doors():
    """`from ferrite.graph import leaves`, not `from ferrite.graph.facts import leaves`. A module that is used by its
    name (`torch_api.is_fake`) is what its package offers, too."""
    assert not [wrong for path in modules() if path != PACKAGE / "__init__.py" for wrong in past_front_doors(path)]


def past_front_doors(path: Path, package: Path = PACKAGE) -> list[str]:
    """Imports of a file that go past the front door of another package."""
    own = path.relative_to(package).parts[0].removesuffix(".py")
    wrong = []
    for node in names_in(path):
        if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("ferrite."):
            continue
        module, parts = str(node.module), str(node.module).split(".")
        if parts[1] != own and len(parts) > 2 and module not in INNER_DOORS:
            wrong.append(f"{path.name}:{node.lineno} imports from {module}")
    return wrong


@pytest.mark.quick
def test_no_module_imports_itself():
    """Not even by way of others. What a function imports when it runs does not count."""
    edges: dict[str, set[str]] = {}
    for path in modules():
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        nodes = [node for node in names_outside_of_functions(path) if isinstance(node, ast.ImportFrom)]
        named = [(f"{node.module}.{alias.name}", str(node.module)) for node in nodes for alias in node.names]
        edges[own] = {name if is_module(name) else module for name, module in named if module.startswith("ferrite")}
        edges[own] -= {own}
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " imports ".join([*above[above.index(name) :], name])
        if name not in done:
            for other in sorted(edges.get(name, ())):
                walk(other, (*above, name))
            done.add(name)

    for name in sorted(edges):
        walk(name, ())


@pytest.mark.quick
def test_no_stage_of_passes_imports_another():
    """What two of them need lies in `passes/shared`, which knows none of them."""
    folders = {path.name for path in (PACKAGE / "passes").iterdir() if (path / "__init__.py").exists()} - {"shared"}
    assert {"pre_grad", "joint", "freezing", "post_grad"} <= folders
    wrong = []
    for path in sorted((PACKAGE / "passes").glob("*/**/*.py")):
        own = path.relative_to(PACKAGE / "passes").parts[0]
        for name, line in imported(path):
            parts = [*name.split("."), ""]
            if parts[:2] == ["ferrite", "passes"] and parts[2] in folders - {own}:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong


@pytest.mark.quick
@pytest.mark.parametrize(
    ("package", "devices", "others_know_none"),
    [("schedule", {"cpu", "gpu"}, True), ("codegen", {"llvm", "triton"}, False), ("runtime", {"cpu", "cuda"}, False)],
)
def test_devices_do_not_know_each_other(package, devices, others_know_none):
    """What they have in common lies in folders and files beside them. Those of the scheduler import no device's."""
    wrong, folders = [], set()
    for path in sorted((PACKAGE / package).rglob("*.py")):
        own = path.relative_to(PACKAGE / package).parts[0]
        folders.add(own)
        if own not in devices and not others_know_none:
            continue
        for name, line in imported(path):
            parts = [*name.split("."), ""]
            if parts[:2] == ["ferrite", package] and parts[2] in devices - {own}:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong
    assert devices < folders


@pytest.mark.quick
def test_nothing_touches_inductor():
    touching = re.compile(r"torch\._inductor|import _inductor")
    wrong = [str(path) for path in modules() if touching.search(path.read_text())]
    assert not wrong


def private_uses(path: Path) -> list[str]:
    """Imports from and attributes of torch modules whose names begin with one underscore."""
    found = [
        f"{path.name}:{line} imports {name}"
        for name, line in imported(path)
        if name.startswith("torch.") and any(p.startswith("_") and not p.startswith("__") for p in name.split("."))
    ]
    for node in names_in(path):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            base: ast.expr = node.value
            while isinstance(base, ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name) and base.id == "torch":
                found.append(f"{path.name}:{node.lineno} uses torch...{node.attr}")
    return found


@pytest.mark.quick
def test_private_torch_apis_have_one_door():
    # one door in five leaves: running the stages; Dynamo; the state of modules; operators; running programs
    doors = [PACKAGE / "capture" / f"torch_{leaf}.py" for leaf in ("api", "dynamo", "state", "operators", "runtime")]
    assert all(map(private_uses, doors)), "the check itself finds nothing"
    wrong = [use for path in modules() if path not in doors for use in private_uses(path)]
    assert not wrong


def run_python(code: str, *flags: str) -> str:
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_no_compiler_and_starts_no_thread():
    code = """
import json, sys, threading, torch
before, threads = set(sys.modules), threading.active_count()
import ferrite
dir(ferrite)
print(json.dumps([sorted(set(sys.modules) - before), threading.active_count() - threads]))
"""
    loaded, threads = json.loads(run_python(code))
    assert threads == 0
    heavy = [name for name in loaded if name.split(".")[0] in ("llvmlite", "triton", "rich", "networkx")]
    assert not heavy
    assert not [name for name in loaded if name.startswith(("torch._dynamo", "torch._functorch", "torch._inductor"))]
    assert len(loaded) < 30  # what makes importing cheap, without a clock


def test_without_llvm_and_triton_calls_are_compiled_and_one_warning_says_what_to_install():
    """With the executor `calls` it is not missed: nothing is said."""
    code = """
import sys, warnings
sys.modules["llvmlite"] = sys.modules["triton"] = None  # importing either raises ImportError
import torch, ferrite
with warnings.catch_warnings():
    warnings.simplefilter("error", ferrite.FerriteWarning)
    torch.compile(torch.sin, backend="ferrite", options={"strict": True, "executor": "calls"})(torch.ones(3))
    assert len(ferrite.last_compile().graphs) == 1
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for number in (1, 2):
        function = torch.compile(lambda x: x * 2 + number, backend="ferrite", options={"strict": True})
        assert torch.equal(function(torch.ones(3)), torch.full((3,), 2.0 + number))
        record = ferrite.last_compile()
        assert not record.kernels and record.graphs[0].failure is None
        assert [call.operator for call in record.eager_calls] == ["aten.mul.Tensor", "aten.add.Tensor"]
(warning,) = [str(each.message) for each in caught if issubclass(each.category, ferrite.FerriteWarning)]
print(warning)
"""
    assert "pip install llvmlite" in run_python(code)
