"""Independent calls made as one before autograd: when that is right, and when it pays.

Whether it is right is `shared.batching`'s to find out. Whether it pays, the option `horizontal` says: `always`,
`off`, or `auto`, which goes by the model below. It may also name rules, which then run always, and the others never:
`{"batch_tanh": {"min_members": 3}, "parallel_linear": {}}`. The numbers of the model are the machine's
(`ferrite.machines`).

On the CPU, as `bench/horizontal.py` measured it on one machine with one thread: the time of the one call, where the
calls apart take 1.

    batches of 32 tiny layers or more               0.4 to 0.9      taken
    batches of 32 other tiny calls or more          0.4 to 0.9      taken where each is a call of torch: as kernels of
                                                                    our own they take as long apart, or less
    other batches                                   0.7 to 1.7      left
    layers on one input, joined in each call        0.6 to 2.1      left
    layers on one input, weights joined once        0.5 to 1.1      taken
    one layer on several inputs                     0.4 to 1.1      left
    sums of layers on pieces                        0.1 to 1.0      taken where the weights are small, or joined once
    products that grow out of the quick way         1.2 to 3.8      left

The quick way is torch's own for tiny products. Much of the gains is what any other product costs there before it
begins, 80 microseconds. Other builds of torch need not have that, but have the copies: so what can lose there is left.

On a GPU a call costs a launch, which the work of a small one does not fill: a batch pays while copying its operands
takes less than half of what the launches do. As `python -m bench.passes rewrites --device cuda` has it, in eager: 0.8
for eight layers or sixteen gates as one, 0.8 for three layers on one input, 0.7 for one layer on four inputs, 1.0 for
eight layer norms, which are left: a norm needs as many calls more as its weights and biases do. Of 32 it pays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, storage_bytes
from ferrite.machines import host_machine, machine_of
from ferrite.options import Options, at_least, choice_of, way
from ferrite.passes.shared.batching import UNLIMITED, Fusion, Settings
from ferrite.pipeline import PassContext

# Whether making these members one pays, so many of them being copied because the caller gets them.
Pays = Callable[[Sequence[torch.fx.Node], int, PassContext], bool]


@dataclasses.dataclass(frozen=True)
class FusionLimits:
    """What a rule may be told beside its name; without, the rule's own numbers hold."""

    min_members: int = at_least(2, 5)
    max_members: int = at_least(2, 300)
    depth: int = UNLIMITED


@dataclasses.dataclass(frozen=True)
class Horizontal(Fusion):
    """A fusion of calls anywhere in a graph of torch calls, `least` of them at least."""

    before_autograd: bool = True
    copies_returned: bool = True
    least: int = 5
    pays: Pays = lambda members, copied, context: False

    def settings(self, context: PassContext) -> Settings:
        own = Settings(depth=UNLIMITED, min_members=self.least)
        chosen = context.options.horizontal
        choice = None if isinstance(chosen, str) else choice_of(chosen, self.name)
        return own if choice is None else dataclasses.replace(own, **dict(choice.settings))

    def profit(self, members: Sequence[torch.fx.Node], returned: int, context: PassContext) -> Refusal | None:
        match way(context.options.horizontal, self.name):
            case "always":
                return None
            case "off":
                return Refusal("the option horizontal is off, or names others")
            case _:
                pays = self.pays(members, returned, context)
                return None if pays else Refusal("the calls apart cost no more, by the model of the option horizontal")


def saves_calls(members: Sequence[torch.fx.Node], copied: int, context: PassContext) -> bool:
    """A batch: its operands are copied together, and each result that the caller gets is copied out."""
    if fake_value(members[0]).device.type != "cuda":
        return many_and_tiny(members, copied) and context.options.executor != "native"
    stacked = sum(bytes_of(operand) for member in members for operand in member.all_input_nodes)
    return saves_launches(members, copied, stacked, len(members[0].all_input_nodes))


def saves_launches(members: Sequence[torch.fx.Node], copied: int, joined: int, concats: int) -> bool:
    """Whether so many concats, of so many bytes, take less than half of what the launches of a GPU do."""
    out = bytes_of(members[0]) * copied
    machine = machine_of(fake_value(members[0]).device)
    saved = machine.call_seconds * (len(members) - 1 - concats - copied)
    return 2 * (2 * joined + 2 * out) / machine.copy_bytes_per_second < saved


def many_and_tiny(members: Sequence[torch.fx.Node], copied: int) -> bool:
    operands = {operand for member in members for operand in member.all_input_nodes}
    on_cpu, machine = fake_value(members[0]).device.type == "cpu", host_machine()
    are_many = on_cpu and not copied and len(members) >= machine.min_tiny_calls
    return are_many and max(map(bytes_of, operands)) <= machine.tiny_operand_bytes


def saves_products(members: Sequence[torch.fx.Node], copied: int, context: PassContext) -> bool:
    """A batch of calls that no kernel of our own does."""
    return many_and_tiny(members, copied) or saves_calls(members, copied, context)


def saves_many_calls(members: Sequence[torch.fx.Node], copied: int, context: PassContext) -> bool:
    """A batch of calls that takes several calls itself."""
    return len(members) >= host_machine().min_tiny_calls and saves_calls(members, copied, context)


def never(members: Sequence[torch.fx.Node], copied: int, context: PassContext) -> bool:
    """A batch that costs as much as its members apart, wherever it was measured."""
    return False


def copy_outweighs(value: torch.Tensor, calls: int) -> bool:
    """Whether copying a value takes longer than so many calls."""
    machine, moved = machine_of(value.device), 2 * torch_api.size_hint(storage_bytes(value))
    return moved / machine.copy_bytes_per_second > calls * machine.call_seconds


def bytes_of(node: torch.fx.Node) -> int:
    return torch_api.size_hint(storage_bytes(fake_value(node)))


def hints(sizes: Sequence[int | torch.SymInt]) -> list[int]:
    return [torch_api.size_hint(size) for size in sizes]


def are_frozen(options: Options, weights: Sequence[Any]) -> bool:
    """Whether tensors are parameters that become constants, so that what depends on them alone is computed once."""
    held = (node.op == "get_attr" or isinstance(fake_value(node), torch.nn.Parameter) for node in weights)
    return options.freeze and all(held)


def concat_is_small(rows: int, features: int, widths: Sequence[int]) -> bool:
    """Whether joining weights moves little memory beside the product itself."""
    weights = features * sum(widths)
    product = rows * features + weights + rows * sum(widths)
    return 2 * weights < host_machine().small_concat_share * product


def rows_of(value: torch.Tensor) -> int:
    return math.prod(hints(value.shape[:-1]))
