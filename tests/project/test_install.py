"""The package as a user meets it: found by name, without a compiler on the machine, from any folder."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import ferrite

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
x = torch.randn(4, 8)
compiled = torch.compile(model, backend="ferrite", options={"strict": True})
assert torch.equal(compiled(x), model(x))
compiled(x).sum().backward()
import ferrite
print(len(ferrite.last_compile().graphs), ferrite.__file__)
"""


@pytest.mark.quick
def test_torch_finds_the_backend_by_name():
    assert "ferrite" in torch.compiler.list_backends()
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="ferrite")
    assert entry.value == "ferrite.api:ferrite"


@pytest.mark.quick
def test_the_version_is_that_of_the_package():
    assert importlib.metadata.version("ferrite") == ferrite.__version__


def test_a_wheel_holds_the_whole_package_and_runs_elsewhere_without_a_compiler(tmp_path):
    """`pip install .` in another folder, then a script of one's own, with nothing on PATH: no cc, gcc, clang or g++."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    target = tmp_path / "site"
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)], check=True
    )
    (wheel,) = tmp_path.glob("ferrite-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("ferrite/")}
    files = [*(ROOT / "ferrite").rglob("*.py"), *(ROOT / "ferrite" / "reports" / "template").iterdir()]
    assert packed == {str(path.relative_to(ROOT)) for path in files} | {"ferrite/py.typed"}
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    environ = {"PATH": str(nothing), "HOME": str(nothing), "PYTHONPATH": str(target)}
    environ["FERRITE_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=tmp_path, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ")
    assert str(target) in done.stdout
