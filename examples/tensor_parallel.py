"""Tensor parallel layers on two processes, in one graph with their collectives, beside the whole model in eager.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Each process has half the columns of the first matrix of a layer and half the rows of the second, and half the tokens
between layers. So every layer gathers tokens, adds its results up and shares them out. These collectives are in the
graph, where one part of the tokens is multiplied while the next is on its way (`async_tp`).
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ferrite

STEPS, TOKENS, WIDTH, LAYERS = 4, 16, 32, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def train(model, batches):
    """The losses; of a model whose results are shared out, those of this process's tokens."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        loss = model(batch).square().sum() / (TOKENS * WIDTH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))

torch.manual_seed(0)  # the same model and batches everywhere
whole = nn.Sequential(*(Layer() for _ in range(LAYERS)))
batches = torch.randn(STEPS, TOKENS, WIDTH)

parallel = copy.deepcopy(whole)
tokens = {"input_layouts": Shard(0)}, {"output_layouts": Shard(0)}
for layer in parallel:
    parallelize_module(layer, mesh, {"up": ColwiseParallel(**tokens[0]), "down": RowwiseParallel(**tokens[1])})
options = {"strict": True, "distributed": {"async_tp": {"chunks": 2}}}
compiled = torch.compile(parallel, backend="ferrite", options=options, fullgraph=True)

losses = train(compiled, batches.chunk(world, dim=1)[rank])
dist.all_reduce(losses)
expected = train(whole, batches)

if rank == 0:
    for step, (loss, eager) in enumerate(zip(losses, expected, strict=True)):
        print(f"step {step}: loss {loss:.6f}, in eager on one process {eager:.6f}")
    found = ferrite.last_compile()
    for graph, now in found.communication.graphs:
        print(f"{graph}: {now.captured.collectives} collectives, {len(now.collectives)} as products begin with parts")
    print({name: times for name, times in found.rewrites.items() if "pipeline" in name})
torch.testing.assert_close(losses, expected)
dist.destroy_process_group()
