"""A sharded model: FSDP2 with its layers compiled, on two processes, beside the whole model in eager.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Each process keeps half of every parameter. FSDP gathers a layer before it runs and shares its gradients out again
behind it, in hooks around what is compiled.
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ferrite

STEPS, WIDTH = 4, 32


def layer():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same model and batches everywhere
whole = nn.Sequential(layer(), layer())
batches = torch.randn(STEPS, 8 * world, WIDTH)

sharded = copy.deepcopy(whole)
mesh = init_device_mesh("cpu", (world,))
for place, each in enumerate(sharded):
    sharded[place] = fully_shard(torch.compile(each, backend="ferrite", options={"strict": True}), mesh=mesh)
fully_shard(sharded, mesh=mesh)

losses = train(sharded, batches.chunk(world, dim=1)[rank])  # its part of every batch
dist.all_reduce(losses)
expected = train(whole, batches)

if rank == 0:
    ours = sum(each.to_local().numel() for each in sharded.parameters())
    print(f"{world} processes; this one keeps {ours} of {sum(each.numel() for each in whole.parameters())} numbers")
    for step, (loss, eager) in enumerate(zip(losses / world, expected, strict=True)):
        print(f"step {step}: loss {loss:.6f}, in eager on one process {eager:.6f}")
    graphs = [graph for record in ferrite.recent_compiles() for graph in record.graphs]
    print(f"{', '.join(graph.kind for graph in graphs)}: {sum(len(graph.kernels) for graph in graphs)} kernels")
torch.testing.assert_close(losses / world, expected)
dist.destroy_process_group()
