"""Graphs of torch calls, for tests of the pre-grad stage: captured two ways, run with gradients, compared.

before = captured(fn, inputs)              what Dynamo gives a backend; `symbolic=True`: with symbolic sizes
before = captured(fn, inputs, "modules")   what symbolic tracing gives: modules are calls, parameters attributes
after = rewritten(before, rules)           in canonical form, the rules applied
assert_same(before, after, make_inputs)
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from ferrite.capture import torch_api
from ferrite.options import Options
from ferrite.passes.pre_grad.canonical import CANONICAL
from ferrite.passes.pre_grad.metadata import add_values
from ferrite.pipeline import PassContext, Pipeline, run_pipeline
from ferrite.rewrite import difference
from tests.compare import assert_no_farther, loss_of, upcast_tree

Form = Literal["dynamo", "modules"]
MakeInputs = Callable[[], list[Any]]


@dataclass
class Captured:
    """A graph, and how to make its arguments of the function's."""

    gm: torch.fx.GraphModule
    arrange: Callable[[Sequence[Any]], list[Any]]

    def copy(self) -> Captured:
        return Captured(copy.deepcopy(self.gm), self.arrange)


def captured(fn: Any, inputs: Sequence[Any], form: Form = "dynamo", *, symbolic: bool = False) -> Captured:
    """The graph of a function or module in canonical form, with fake values."""
    found = by_dynamo(fn, inputs, symbolic) if form == "dynamo" else by_symbolic_tracing(fn, inputs)
    add_values(found.gm, inputs)
    canonical(found.gm)
    return found


def by_symbolic_tracing(fn: Any, inputs: Sequence[Any]) -> Captured:
    tracer = Unrolling(inputs)
    graph = tracer.trace(fn)
    return Captured(torch.fx.GraphModule(tracer.root, graph), list)


class Unrolling(torch.fx.Tracer):
    """Symbolic tracing that can also go through `*args` and the results of a call, which it computes to count them."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.inputs = inputs

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        own = list(inspect.signature(root_fn).parameters.values())[is_module:]
        names = [each.name for each in own if each.kind is each.POSITIONAL_OR_KEYWORD][: len(self.inputs)]
        names += [f"x{place}" for place in range(len(names), len(self.inputs))]  # those of `*args`
        given = [self.create_proxy("placeholder", name, (), {}) for name in names]
        return root_fn, [self.root, *given] if is_module else given

    def count(self, node: torch.fx.Node) -> int:
        so_far = torch.fx.Interpreter(copy.deepcopy(self.root), garbage_collect_values=False, graph=self.graph)
        so_far.run(*pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), list(self.inputs)))
        return len(so_far.env[node])

    def iter(self, obj: torch.fx.Proxy) -> Any:
        return iter([obj[place] for place in range(self.count(obj.node))])

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        return Counted(node, self)


class Counted(torch.fx.Proxy):
    def __len__(self) -> int:  # what `[*results]` asks for
        return self.tracer.count(self.node)  # type: ignore[attr-defined]


def by_dynamo(fn: Any, inputs: Sequence[Any], symbolic: bool) -> Captured:
    """The one graph that Dynamo makes of a function."""
    torch.compiler.reset()
    found: list[Captured] = []

    def keep(gm: torch.fx.GraphModule, given: list[Any]) -> Any:
        places = [place_of(value, inputs) for value in given]
        hints = [torch_api.size_hint(value) if isinstance(value, torch.SymInt) else value for value in given]

        def arrange(fresh: Sequence[Any]) -> list[Any]:
            return [hint if place is None else fresh[place] for place, hint in zip(places, hints, strict=True)]

        found.append(Captured(gm, arrange))
        return gm.forward

    torch.compile(fn, backend=keep, fullgraph=True, dynamic=symbolic)(*inputs)
    assert len(found) == 1
    return found[0]


def place_of(value: Any, inputs: Sequence[Any]) -> int | None:
    return next((place for place, each in enumerate(inputs) if each is value), None)


def canonical(gm: torch.fx.GraphModule) -> None:
    run_pipeline(Pipeline("canonical", CANONICAL), gm, PassContext(Options(strict=True)))


@dataclass
class Outcome:
    outputs: list[Any]
    inputs: list[Any]
    gradients: list[torch.Tensor | None]
    sharing: set[tuple[int, int]]


def run(graph: Captured, make_inputs: MakeInputs, *, upcast: bool = False) -> Outcome:
    """One call, and the gradients of whatever is differentiable."""
    torch.manual_seed(0)
    inputs = make_inputs()
    inputs = upcast_tree(inputs) if upcast else inputs
    keeps_state = any(node.op in ("get_attr", "call_module") for node in graph.gm.graph.nodes)
    gm = copy.deepcopy(graph.gm) if keeps_state else graph.gm
    gm = gm.double() if upcast else gm
    gm.recompile()
    outputs = pytree.tree_leaves(gm(*graph.arrange(inputs)))
    tensors = [item for item in (*inputs, *outputs) if isinstance(item, torch.Tensor)]
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    sharing = {(i, j) for i, a in enumerate(storages) for j, b in enumerate(storages) if i < j and a == b}
    leaves = [item for item in inputs if isinstance(item, torch.Tensor) and item.is_leaf and item.requires_grad]
    leaves += [parameter for parameter in gm.parameters() if parameter.requires_grad]
    gradients: list[torch.Tensor | None] = []
    if any(isinstance(item, torch.Tensor) and item.requires_grad for item in outputs) and leaves:
        loss_of(outputs).backward()
        gradients = [leaf.grad for leaf in leaves]
    return Outcome(outputs, inputs, gradients, sharing)


def assert_same(before: Captured, after: Captured, make_inputs: MakeInputs, *, exact: bool = True) -> None:
    """Values (`exact`: to the bit), looks, gradients and their absence, sharing, and inputs after the call."""
    old, new = run(before, make_inputs), run(after, make_inputs)
    truth = None if exact else run(before, make_inputs, upcast=True)
    assert new.sharing == old.sharing, "inputs and outputs share memory otherwise"
    for mine, theirs in zip(new.inputs, old.inputs, strict=True):
        assert not isinstance(theirs, torch.Tensor) or same_bits(mine, theirs), "an input was left otherwise"
    assert len(new.outputs) == len(old.outputs)
    for place, (mine, theirs) in enumerate(zip(new.outputs, old.outputs, strict=True)):
        assert difference(theirs, mine) is None, f"output {place}"
        if isinstance(theirs, torch.Tensor):
            assert mine.requires_grad == theirs.requires_grad, f"output {place}"
            assert_same_values(mine, theirs, truth and truth.outputs[place], f"output {place}")
    assert len(new.gradients) == len(old.gradients)
    for place, (mine, theirs) in enumerate(zip(new.gradients, old.gradients, strict=True)):
        assert (mine is None) == (theirs is None), f"gradient {place}"
        if theirs is not None:
            truer = truth.gradients[place] if truth is not None else theirs.double()
            assert_same_values(mine, theirs, truer if theirs.is_floating_point() else None, f"gradient {place}")


def assert_same_values(mine: Any, theirs: Any, truth: Any, where: str) -> None:
    if truth is None or not theirs.is_floating_point():
        assert same_bits(mine, theirs), where
    else:
        assert_no_farther(mine.detach(), theirs.detach(), truth.detach(), where)


def same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal, with NaN equal to NaN, and 0.0 not equal to -0.0."""
    if not theirs.is_floating_point():
        return torch.equal(mine, theirs)
    numbers = [torch.where(each.isnan(), 0.0, each) for each in (mine, theirs)]
    signs = [each.signbit() for each in numbers]
    return torch.equal(mine.isnan(), theirs.isnan()) and torch.equal(*numbers) and torch.equal(*signs)
