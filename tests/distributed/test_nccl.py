"""The programs of this folder with the process groups that GPUs have; and that whoever hangs there says where."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.gpu_ranks import SETTINGS, assert_runs, names
from tests.triton_kernels import ON_A_GPU

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
ON_GPUS = ("nccl", "shared memory", "gloo")


def cases() -> list[tuple[str, str]]:
    return [(setting, name) for setting in ON_GPUS for name in names(setting)]


@pytest.mark.parametrize(("setting", "name"), [pytest.param(*each, marks=ON_A_GPU) for each in cases()])
def test_results_are_those_of_eager(setting, name):
    assert_runs(setting, name)


@pytest.mark.parametrize("setting", [name for name, each in SETTINGS.items() if each.device == "cpu"])
def test_the_same_programs_run_without_a_gpu(setting):
    assert_runs(setting, "operation joined_together")


def test_a_program_that_hangs_says_where():
    with pytest.raises(AssertionError, match=r"(?s)Timeout.*a_place_to_hang_at"):
        assert_runs("one on a cpu", "hangs", patience=10)


def test_what_torch_itself_cannot_is_skipped():
    with pytest.raises(pytest.skip.Exception, match="rank 0 cannot"):
        assert_runs("one on a cpu", "fails")
