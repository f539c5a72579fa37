"""Training on two ranks, of each kind one program with a small model, all by one start of the ranks: losses, gradients
and parameters are the uncompiled run's. The files of the kinds have many more, with several layers; functional
collectives are in `test_random_graphs.py` each day."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import test_data_parallel_training as data_parallel
from tests.distributed import test_model_parallel_training as model_parallel
from tests.distributed.training import of_one_layer
from tests.ranks import assert_none_failed, outcomes

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without distributed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # newer names of functional collectives
]
NAMES = (
    "ddp ddp_optimizer",
    "fsdp, mixed precision",
    "gathered in forward",
    "sequence parallel",
    "experts, as the router says",
)


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    programs = {**data_parallel.PROGRAMS, **model_parallel.PROGRAMS}
    return outcomes({name: of_one_layer(programs[name]) for name in NAMES}, patience=300)


@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_eager(name, found):
    assert_none_failed(found[name])
