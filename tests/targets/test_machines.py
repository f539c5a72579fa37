"""All that is measured about a machine is a field of it: passes, lowering and targets ask the same one."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import ferrite
from bench.gpu_variants import VARIANTS
from ferrite.machines import H200, NEOVERSE_N1, XEON, GpuMachine, Machine, host_machine, machine_of
from ferrite.targets.cpu import CPU

pytestmark = pytest.mark.quick


def test_passes_and_the_scheduler_have_one_processor():
    asked, scheduled = host_machine(), CPU.scheduling.machine
    assert asked.panel_columns(torch.float32) == scheduled.panel_columns(torch.float32)
    assert (asked.depthwise, asked.beside_torch) == (scheduled.depthwise, scheduled.beside_torch)


def test_a_device_has_a_machine():
    assert machine_of(torch.device("cpu")) is host_machine()
    assert machine_of(torch.device("cuda")) == machine_of(torch.device("meta")) == H200
    assert hash(NEOVERSE_N1) != hash(XEON)


@pytest.mark.parametrize("machine", [Machine, GpuMachine])
def test_every_number_decides_something(machine):
    sources = "\n".join(path.read_text() for path in Path(ferrite.__file__).parent.rglob("*.py"))
    assert {field.name for field in fields(machine)} <= set(re.findall(r"\.(\w+)\b", sources))


def test_what_is_tried_of_a_gpu_are_its_fields():
    tried = {name for variants in VARIANTS.values() for each in variants for name in each}
    assert tried
    assert tried <= {field.name for field in fields(GpuMachine)}
