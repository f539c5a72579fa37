"""What is asked of the machine's caches."""

from __future__ import annotations

import pytest

from ferrite.targets.cpu import CPU
from ferrite.targets.cpu_caches import Cache, count_of, data_caches

pytestmark = pytest.mark.quick

L1 = {"level": "1", "type": "Data", "size": "48K", "ways_of_associativity": "12", "shared_cpu_list": "0,64"}
CODE = {**L1, "type": "Instruction", "size": "32K", "ways_of_associativity": "8"}
L2 = {"level": "2", "type": "Unified", "size": "2M", "ways_of_associativity": "16", "shared_cpu_list": "0-3"}


def folder_of(path, *caches):
    for number, each in enumerate(caches):
        (path / f"index{number}").mkdir()
        for name, text in each.items():
            (path / f"index{number}" / name).write_text(text + "\n")
    return path


def test_caches_for_data_by_level(tmp_path):
    caches = data_caches(folder_of(tmp_path, L1, CODE, L2))
    assert caches == {1: Cache(48 << 10, 12, 2), 2: Cache(2 << 20, 16, 4)}
    assert caches[1].way_bytes == 4 << 10
    assert caches[2].share == 512 << 10  # half of it, of two cores


def test_what_cannot_be_is_not_believed(tmp_path):
    without_ways = {**L2, "level": "3", "ways_of_associativity": "0"}
    silent = {name: text for name, text in L2.items() if name != "size"}
    assert data_caches(folder_of(tmp_path, without_ways, silent)) == {}
    assert data_caches(tmp_path / "nowhere") == {}
    assert Cache(512 << 20, 16, 1).share == 2 << 20


def test_lists_of_processors():
    assert [count_of(text) for text in ("0", "0-3", "0,64\n", "0-3,8")] == [1, 4, 2, 5]


def test_code_for_other_caches_is_other_code():
    assert str(data_caches()) in CPU.identity()
