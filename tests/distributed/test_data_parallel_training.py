"""Data parallel training, compiled, on two ranks: losses, gradients and parameters are the uncompiled run's.

All programs of this file share one start of the ranks. `test_training.py` has some of them each day, with one layer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ferrite
from tests.distributed.training import (
    STRICT,
    Transformer,
    batches,
    compare,
    compiled,
    device,
    loss_of,
    of_one_layer,
    whole,
)
from tests.ranks import assert_none_failed, outcomes

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
Program = Callable[[int], Any]

# --- DistributedDataParallel ------------------------------------------------------------------------------------------


def ddp(mode: Any, **more: Any) -> Program:
    """DDP in one of the modes of `torch._dynamo.config.optimize_ddp`."""

    def program(rank: int) -> int:
        from torch.nn.parallel import DistributedDataParallel

        by_autograd = mode == "python_reducer"

        def build(is_compiled: bool) -> tuple[nn.Module, Any]:
            model = Transformer()
            module = DistributedDataParallel(model, bucket_cap_mb=0.06, **more)
            return module, compiled(module) if is_compiled else module

        # several buckets, of so small a model
        with (
            pytest.MonkeyPatch.context() as patch,
            torch._dynamo.config.patch(optimize_ddp=mode, compiled_autograd=by_autograd),
        ):
            patch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 4096)
            compare(build, rank)
            assert ferrite.last_compile().graphs
            return sum(record.communication.collectives for record in ferrite.recent_compiles())

    return program


def accumulated_ddp(rank: int) -> None:
    """Gradients of three batches, exchanged once."""
    from torch.nn.parallel import DistributedDataParallel

    def build(is_compiled: bool) -> tuple[nn.Module, Any]:
        module = DistributedDataParallel(Transformer())
        return module, compiled(module) if is_compiled else module

    def prepare(module: Any, step: int) -> None:
        module.require_backward_grad_sync = step % 3 == 2

    compare(build, rank, steps=9, prepare=prepare, steps_each=3)


DDP_MODES = (
    "ddp_optimizer",
    "python_reducer",
    "python_reducer_without_compiled_forward",
    "no_optimization",
    True,
    False,
)
PROGRAMS: dict[str, Program] = {f"ddp {mode}": ddp(mode) for mode in DDP_MODES if "reducer" not in str(mode)}
PROGRAMS["ddp, unused parameters are looked for"] = ddp("ddp_optimizer", find_unused_parameters=True)
PROGRAMS["ddp, static graph"] = ddp("no_optimization", static_graph=True)
PROGRAMS["ddp, gradients as views of buckets"] = ddp("ddp_optimizer", gradient_as_bucket_view=True)
PROGRAMS["ddp, accumulated"] = accumulated_ddp

# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def fsdp(
    reshards: bool = True, is_mixed: bool = False, whole_model: bool = False, accumulates: bool = False
) -> Program:
    """FSDP2 of each layer and of the rest. `whole_model`: compiled as one, and not layer by layer."""

    def program(rank: int) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        kinds = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if is_mixed else {}
        policy = MixedPrecisionPolicy(**kinds)

        def build(is_compiled: bool) -> tuple[nn.Module, Any]:
            model = Transformer()
            for block in model.blocks:
                if is_compiled and not whole_model:
                    block.compile(backend="ferrite", options=STRICT)
                fully_shard(block, mp_policy=policy, reshard_after_forward=reshards)
            fully_shard(model, mp_policy=policy, reshard_after_forward=reshards)
            return model, compiled(model) if is_compiled and whole_model else model

        def prepare(module: Any, step: int) -> None:
            if accumulates:
                module.set_requires_gradient_sync(step % 2 == 1)

        compare(build, rank, prepare=prepare, steps_each=2 if accumulates else 1, half=is_mixed)
        assert ferrite.last_compile().graphs

    return program


def gathered_in_forward(rank: int) -> int:
    """Parameters that are gathered in the graph, by a parametrization: the program's own FSDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(device().type, (dist.get_world_size(),))

    class Whole(nn.Module):
        def forward(self, parameter: Any) -> torch.Tensor:
            gathered = parameter.redistribute(placements=[Replicate()])
            return gathered.to_local(grad_placements=[Partial("avg")])

    def build(is_compiled: bool) -> tuple[nn.Module, Any]:
        model = Transformer()
        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                shard = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
                module.register_parameter(name, shard)
                nn.utils.parametrize.register_parametrization(module, name, Whole(), unsafe=True)
        return model, compiled(model) if is_compiled else model

    compare(build, rank)
    return ferrite.last_compile().communication.collectives


def checkpointed(rank: int) -> None:
    """Trained, saved, read into another model, and trained on: as if nothing had happened in between."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Transformer()
        for block in model.blocks:
            block.compile(backend="ferrite", options=STRICT)
            fully_shard(block)
        fully_shard(model)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> None:
        for x, y in data:
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()

    data = list(batches(rank, 6))
    torch.manual_seed(0)
    model, optimizer = made()
    steps(model, optimizer, data[:3])
    folder = [tempfile.mkdtemp(dir=os.environ["RANKS_FOLDER"]) if rank == 0 else None]
    dist.broadcast_object_list(folder)
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.state_dict_saver.save({"model": weights, "optimizer": moments}, checkpoint_id=folder[0])
    steps(model, optimizer, data[3:])
    wanted = [whole(each) for each in model.parameters()]
    torch.manual_seed(1)
    other, its_optimizer = made()
    weights, moments = get_state_dict(other, its_optimizer)
    saved = {"model": weights, "optimizer": moments}
    checkpoint.state_dict_loader.load(saved, checkpoint_id=folder[0])
    set_state_dict(other, its_optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    steps(other, its_optimizer, data[3:])
    for mine, theirs in zip(other.parameters(), wanted, strict=True):
        torch.testing.assert_close(whole(mine), theirs)


PROGRAMS |= {
    "fsdp": fsdp(),
    "fsdp, no reshard": fsdp(reshards=False),
    "fsdp, mixed precision": fsdp(is_mixed=True),
    "fsdp, mixed precision, no reshard": fsdp(reshards=False, is_mixed=True),
    "fsdp, accumulated": fsdp(accumulates=True),
    "fsdp, the whole model": fsdp(whole_model=True),
    "fsdp, the whole model, mixed precision": fsdp(whole_model=True, is_mixed=True),
    "gathered in forward": gathered_in_forward,
    "checkpoint": checkpointed,
}
# The last ones: in a process that has run these, torch's DDP with `find_unused_parameters` fails under any backend.
PROGRAMS |= {f"ddp {mode}": ddp(mode) for mode in DDP_MODES if "reducer" in str(mode)}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return outcomes(PROGRAMS, patience=900)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_is_that_of_eager(name, found):
    assert_none_failed(found[name])


OF_FOUR = ("ddp ddp_optimizer", "ddp, accumulated", "fsdp, mixed precision", "gathered in forward")


@pytest.fixture(scope="module")
def of_four() -> dict[str, list[Any]]:
    return outcomes({name: of_one_layer(PROGRAMS[name]) for name in OF_FOUR}, world=4, patience=600)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_training_on_four_ranks_is_that_of_eager(name, of_four):
    assert_none_failed(of_four[name])
