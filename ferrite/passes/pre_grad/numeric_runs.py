"""Run a graph on copies, and compare two runs: values, looks, sharing, inputs after the call, gradients.

Nothing here touches a tensor of the user's: inputs are copied storage by storage, so that those which share memory
still do, and modules are copied whole.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import NotApplied
from ferrite.graph import Storage, fake_value, is_random, storages_in, tensor_storages
from ferrite.rewrite import difference

NARROW = (torch.float16, torch.bfloat16, torch.float32)
FACTOR, ULPS = 2.0, 4.0  # how much farther from the float64 run than before a result may be


@dataclass(frozen=True)
class Maker:
    """Makes the arguments of a graph: copies of examples, or random tensors that look like them; `wide`: in float64."""

    graph: torch.fx.Graph
    examples: Sequence[Any]
    random: bool
    wide: bool

    def arguments(self) -> tuple[list[Any], list[torch.Tensor]]:
        """The arguments, and the leaves to differentiate by."""
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        examples = [*self.examples, *(None for _ in inputs[len(self.examples) :])]
        memory: dict[tuple[Storage, torch.dtype], torch.Tensor] = {}
        leaves = [self.argument(node, example, memory) for node, example in zip(inputs, examples, strict=True)]
        given = [
            leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not is_leaf(example) else leaf
            for leaf, example in zip(leaves, examples, strict=True)
        ]
        return given, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]

    def argument(self, node: torch.fx.Node, example: Any, memory: dict[Any, torch.Tensor]) -> Any:
        if isinstance(example, torch.Tensor) and not torch_api.is_fake(example) and not self.random:
            return self.placed(example, example, memory)
        value = fake_value(node)
        if isinstance(value, torch.Tensor):
            return self.placed(value, example if isinstance(example, torch.Tensor) else value, memory)
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            raise NotApplied(f"nobody knows a value for the input {node.name}")
        return known_size(value) if isinstance(value, torch.SymInt) else value if example is None else plain(example)

    def placed(self, like: torch.Tensor, flags: torch.Tensor, memory: dict[Any, torch.Tensor]) -> torch.Tensor:
        """A tensor that lies in a copied storage as the given one lies in its own."""
        if like.layout is not torch.strided:
            raise NotApplied(f"an input is {like.layout}")
        (storage,) = tensor_storages(like)
        key = (storage, like.dtype)
        if key not in memory:
            memory[key] = self.contents(like)
        sizes, strides = ([known_size(number) for number in numbers] for numbers in (like.shape, like.stride()))
        found = memory[key].as_strided(sizes, strides, known_size(like.storage_offset()))
        return found.detach().requires_grad_() if flags.requires_grad else found

    def contents(self, like: torch.Tensor) -> torch.Tensor:
        """The whole storage as one row of numbers."""
        count = known_size(like.untyped_storage().nbytes()) // like.element_size()
        if torch_api.is_fake(like) or self.random:
            row = random_row(count, like.dtype, like.device)
        else:
            row = torch.empty(0, dtype=like.dtype, device=like.device)
            row.set_(like.untyped_storage().clone(), 0, (count,), (1,))
        return row.double() if self.wide and row.dtype in NARROW else row


def is_leaf(example: Any) -> bool:
    """What autograd computed may be written in place, a leaf not."""
    return not isinstance(example, torch.Tensor) or example.is_leaf


def random_row(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        kind = dtype if dtype.itemsize > 1 else torch.float32
        return torch.randn(count, dtype=kind, device=device).to(dtype)
    return torch.randint(0, 2, (count,), device=device).to(dtype)  # as indices they fit almost everything


def known_size(number: int | torch.SymInt) -> int:
    if isinstance(number, int):
        return number
    if not torch_api.has_hint(number):
        raise NotApplied(f"nobody knows a value for the size {number}")
    return torch_api.size_hint(number)


def plain(example: Any) -> Any:
    return known_size(example) if isinstance(example, torch.SymInt) else example


@dataclass(frozen=True)
class Observed:
    """Everything that one run lets a caller observe."""

    outputs: list[Any]
    inputs: list[Any]
    gradients: list[torch.Tensor | None]
    sharing: frozenset[frozenset[int]]
    random: bool


def run_graph(gm: torch.fx.GraphModule, maker: Maker, seed: int, *, grad: bool, gradients: bool) -> Observed:
    """One run of a copy on copies; random generators are left as they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    # torch.manual_seed formats a traceback for each kind of device that is not there
    set_seed = torch.manual_seed if devices else torch.default_generator.manual_seed
    with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(grad):
        set_seed(seed)
        own = copy.deepcopy(gm)
        own = own.double() if maker.wide else own
        own.recompile()
        arguments, leaves = maker.arguments()
        leaves += [parameter for parameter in own.parameters() if parameter.requires_grad]
        set_seed(seed)
        outputs = torch_api.tree_leaves(own(*arguments))
        losses = [loss_of(item) for item in outputs if isinstance(item, torch.Tensor) and item.requires_grad]
        found: list[torch.Tensor | None] = []
        if gradients and losses and leaves:
            found = list(torch.autograd.grad(losses, leaves, allow_unused=True))
    random = any(is_random(node) for node in gm.graph.nodes if node.op.startswith("call_"))
    return Observed(outputs, arguments, found, sharing_of([*arguments, *outputs]), random)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A number that weighs every element differently."""
    real = torch.view_as_real(output.resolve_conj()) if output.is_complex() else output
    weights = torch.linspace(0.5, 1.5, real.numel(), dtype=torch.float64, device=real.device)
    return (real * weights.reshape(real.shape).to(real.dtype)).sum()


def sharing_of(values: list[Any]) -> frozenset[frozenset[int]]:
    groups: dict[Storage, set[int]] = {}
    for place, value in enumerate(values):
        for storage in storages_in(value):
            groups.setdefault(storage, set()).add(place)
    return frozenset(frozenset(places) for places in groups.values() if len(places) > 1)


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tolerance:
    rtol: float
    atol: float
    values: bool  # whether values are compared at all


def unlike(before: Observed, after: Observed, truth: Observed | None, tolerance: Tolerance) -> str | None:
    """The first thing in which two runs differ."""
    if after.sharing != before.sharing:
        return "inputs and outputs share memory otherwise"
    for kind in ("outputs", "inputs", "gradients"):
        old, new = getattr(before, kind), getattr(after, kind)
        true = getattr(truth, kind) if truth is not None else [None] * len(old)
        if len(new) != len(old):
            return f"there are {len(new)} {kind} instead of {len(old)}"
        for place, each in enumerate(zip(old, new, true, strict=True)):
            found = unlike_values(*each, tolerance)
            if found is not None:
                return f"{kind.removesuffix('s')} {place}: {found}"
    return None


def unlike_values(old: Any, new: Any, true: Any, tolerance: Tolerance) -> str | None:
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return None if type(old) is type(new) and same(old, new) else f"{new} instead of {old}"
    problem = difference(old, new)
    if problem is not None or not tolerance.values:
        return problem
    if old.requires_grad != new.requires_grad:
        return f"requires_grad is {new.requires_grad}"
    if not old.is_floating_point() and not old.is_complex():
        return None if torch.equal(old, new) else "the values differ"
    judge = true if isinstance(true, torch.Tensor) and old.dtype in NARROW else None
    return too_far(old, new, judge, tolerance)


def same(old: Any, new: Any) -> bool:
    return bool(old == new) or (isinstance(old, float) and old != old and new != new)


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Real numbers in float64."""
    dense = tensor.detach().resolve_conj().resolve_neg()
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    return dense.to(torch.float64)


def too_far(old: torch.Tensor, new: torch.Tensor, judge: torch.Tensor | None, tolerance: Tolerance) -> str | None:
    """The new numbers may be little farther from the true ones than the old; without these, from the old."""
    kind = torch.finfo(old.dtype)
    old, new, true = (numbers(each) for each in (old, new, old if judge is None else judge))
    for name, special in (("NaN", torch.isnan), ("infinity", torch.isposinf), ("minus infinity", torch.isneginf)):
        if not torch.equal(special(old), special(new)):
            return f"{name} in other places"
    finite = old.isfinite() & true.isfinite()
    old, new, true = old[finite], new[finite], true[finite]
    if not new.numel():
        return None
    largest = true.abs().max().item()
    if judge is not None:
        allowed = FACTOR * (old - true).abs().max().item() + ULPS * kind.eps * largest
    else:
        allowed = kind.eps ** (2 / 3) * largest  # nothing better is known: rounding of a few thousand operations
    allowed += tolerance.rtol * largest + tolerance.atol + kind.tiny
    worst = (new - true).abs().max().item()
    if worst <= allowed:
        return None
    return f"off by {worst:.3g}, where it was off by {(old - true).abs().max().item():.3g} before"
