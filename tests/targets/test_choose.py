"""Which targets a graph is compiled for: by its devices, and by what is installed."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from ferrite.errors import FerriteWarning
from ferrite.options import resolve
from ferrite.targets import buildable, choose, targets_for
from ferrite.targets.cpu import CPU
from ferrite.targets.cuda import CUDA


@pytest.fixture
def with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "cuda_is_here", lambda: True)


def test_targets_are_those_of_the_devices_of_a_graph(with_a_gpu):
    options = resolve({"executor": "native"})
    assert targets_for(options, {"cpu"}) == {"cpu": CPU}
    assert targets_for(options, {"cpu", "cuda"}) == {"cpu": CPU, "cuda": CUDA}
    assert targets_for(options, {"cuda"}) == {"cuda": CUDA}  # nothing asks for LLVM
    assert targets_for(options, set()) == {"cpu": CPU}
    assert targets_for(options, {"meta"}) == {"cpu": CPU}
    assert targets_for(resolve({"executor": "calls"}), {"cuda"}) == {}


def test_without_a_gpu_everything_on_it_is_a_call(monkeypatch):
    monkeypatch.setattr(choose, "cuda_is_here", lambda: False)
    assert targets_for(resolve({"executor": "native"}), {"cuda"}) == {"cpu": CPU}


def test_without_triton_everything_on_a_gpu_is_a_call(with_a_gpu, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    choose.triton_is_here.cache_clear()
    try:
        with pytest.warns(FerriteWarning, match="nothing is compiled to kernels for the GPU"):
            assert buildable({"cpu": CPU, "cuda": CUDA}) == {"cpu": CPU}
        assert buildable({"cuda": CUDA}) == {}  # said once
    finally:
        choose.triton_is_here.cache_clear()


@pytest.mark.parametrize(
    ("version", "is_enough"), [("3.5.1", False), ("2.3.0+git1", False), ("3.6.0", True), ("3.10.0", True)]
)
def test_an_old_triton_is_as_none(with_a_gpu, monkeypatch, version, is_enough):
    monkeypatch.setattr(choose, "triton_version", lambda: version)
    monkeypatch.setitem(__import__("sys").modules, "triton", ModuleType("triton"))
    choose.triton_is_here.cache_clear()
    try:
        if is_enough:
            assert buildable({"cuda": CUDA}) == {"cuda": CUDA}
        else:
            with pytest.warns(FerriteWarning, match=f"Triton {re.escape(version)} is older than 3.6"):
                assert buildable({"cpu": CPU, "cuda": CUDA}) == {"cpu": CPU}
            assert buildable({"cuda": CUDA}) == {}  # said once
    finally:
        choose.triton_is_here.cache_clear()
