"""What a node does besides computing its value: writes, random draws, other effects; and the regions writes make.

A write splits a graph into regions: what is read before it must not be read after it. A rewrite that takes nodes from
two regions would move a read across a write.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ferrite.graph import torch_calls
from ferrite.graph.facts import WRITES_UNSAID, argument, bodies_of, schema_of

# In the metadata of an input that is written once the graph, or its forward part, has run.
WRITTEN_AFTER = "written_after"
# In the metadata of a node that launches a kernel of the user's: the kernel, which the graph knows by number only.
USER_KERNEL = "user_kernel"
# Higher-order operators have no schema that would tell.
MUTATING_HIGHER_ORDER = frozenset({"triton_kernel_wrapper_mutation"})
RANDOM_HIGHER_ORDER = frozenset(
    {"run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state", "run_dtensor_rng_op"}
)
# With nothing to drop they return their operand; native_dropout draws all the same.
RETURNING_DROPOUTS = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"})
EFFECTFUL_HIGHER_ORDER = frozenset({"with_effects", "print", "call_torchbind", "invoke_leaf_function"})
# Sending and waiting, profiler ranges, streams and events: their order and number is what they are for.
EFFECTFUL_NAMESPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "symm_mem", "profiler", "streams"}
)
ASSERTIONS = ("_assert", "sym_constrain_range", "_linalg_check_errors", "_print", "_functional_assert")


def mutates(node: torch.fx.Node) -> bool:
    """Whether a node writes into one of its operands, itself or in a graph it runs."""
    return not _only_reads(node.target) and _with_bodies(node, _mutates_itself)


def is_random(node: torch.fx.Node) -> bool:
    """Whether a node draws from a random generator, itself or in a graph it runs."""
    return _with_bodies(node, _random_itself)


def has_effect(node: torch.fx.Node) -> bool:
    """Whether a node does more than compute its value, so that it must stay though nobody reads it."""
    return _with_bodies(node, _effect_itself)


def is_collective(node: torch.fx.Node) -> bool:
    """Whether a node starts, or waits for, a collective between processes."""
    return "c10d" in _namespace(node.target) or _namespace(node.target) == "symm_mem"


def is_wait(node: torch.fx.Node) -> bool:
    """Whether a node waits for the end of a collective that another node started."""
    return is_collective(node) and _name(node.target).startswith("wait_tensor")


def has_collectives(graph: torch.fx.Graph) -> bool:
    """Whether something in a graph waits for a collective. Looks at no node."""
    wait = _wait_operator()
    return wait is not None and bool(graph.find_nodes(op="call_function", target=wait, sort=False))


@functools.cache
def _wait_operator() -> Any | None:
    """torch built without torch.distributed has none."""
    packet = getattr(getattr(torch.ops, "_c10d_functional"), "wait_tensor", None)  # noqa: B009  # it is no attribute
    return None if packet is None else packet.default


class Regions:
    """The mutation region of each node of a graph as it is now. Linear to build.

    A writing node is a region of its own: moved past any neighbour it might meet a read of what it writes. So is one
    that switches a mode (gradients, autocast), or of which nobody knows what it does.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.numbers: dict[torch.fx.Node, int] = {}
        current = 0
        answers: dict[Any, bool] = {}
        for node in graph.nodes:
            splits = torch_calls.is_barrier(node) or (
                not _only_reads(node.target) and _with_bodies(node, _mutates_itself, answers)
            )
            current += splits
            self.numbers[node] = current
            current += splits

    def of(self, node: torch.fx.Node) -> int | None:
        """The region of a node; None for one made later that nobody placed."""
        return self.numbers.get(node)

    def adopt(self, new: torch.fx.Node, like: torch.fx.Node) -> None:
        """Put a node that a rewrite made into the region of the one it stands for."""
        if like in self.numbers:
            self.numbers[new] = self.numbers[like]

    def same_region(self, first: torch.fx.Node, second: torch.fx.Node) -> bool:
        """Whether no write lies between two nodes. A node that nobody placed is in no region."""
        region = self.of(first)
        return region is not None and region == self.of(second)

    def all_in_one(self, nodes: Iterable[torch.fx.Node]) -> bool:
        found = {self.of(node) for node in nodes}
        return len(found) <= 1 and None not in found


def _with_bodies(
    node: torch.fx.Node, does: Callable[[torch.fx.Node], bool], answers: dict[Any, bool] | None = None
) -> bool:
    """Whether a node does something, or any node of the graphs it runs; `known` saves looking into a body twice."""
    if does(node):
        return True
    if not _runs_bodies(node):
        return False
    answers = {} if answers is None else answers
    for body in bodies_of(node):
        if body not in answers:
            inner = (each for each in body.graph.nodes if each.op not in ("placeholder", "output"))
            answers[body] = any(_with_bodies(each, does, answers) for each in inner)
        if answers[body]:
            return True
    return False


def _runs_bodies(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and schema_of(node.target) is None and node.target is not operator.getitem


def _mutates_itself(node: torch.fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if schema_of(node.target) is not None:
        writes = _writes_by_schema(node.target)
        return writes if isinstance(writes, bool) else argument(node, writes) not in (False, None)
    if any(each._schema.is_mutable for each in _choices(node)):
        return True
    return _name(node.target) in MUTATING_HIGHER_ORDER or torch_calls.writes(node)


@functools.cache
def _only_reads(target: object) -> bool:
    """Whether a call of this writes nothing, whatever it is given. Most calls are of such operators."""
    return schema_of(target) is not None and _writes_by_schema(target) is False


@functools.cache
def _writes_by_schema(operator_: Any) -> bool | str:
    """Whether an operator writes; or the name of the argument that decides it: statistics that are written while
    training are in no schema."""
    schema = schema_of(operator_)
    if schema is not None and (schema.is_mutable or schema.name in WRITES_UNSAID):
        return True
    return torch_calls.TRAINING_FLAG.get(_name(operator_).removeprefix("native_").removeprefix("cudnn_"), False)


def _random_itself(node: torch.fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    if _name(node.target) in RANDOM_HIGHER_ORDER:
        return True
    if schema_of(node.target) is None:
        return torch_calls.draws(node)
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    # Attention and dropout draw only where something is dropped.
    chance, training = argument(node, "dropout_p"), argument(node, "train")
    if _name(node.target) in RETURNING_DROPOUTS:
        chance = argument(node, "p")
    return not (training is False or (isinstance(chance, (int, float)) and chance == 0))


def _effect_itself(node: torch.fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if _mutates_itself(node) or _random_itself(node):
        return True
    if torch_calls.is_barrier(node):
        return True
    if node.op != "call_function":
        return bool(node.is_impure(impure_random=False))
    name, namespace = _name(node.target), _namespace(node.target)
    if namespace in EFFECTFUL_NAMESPACES or name in EFFECTFUL_HIGHER_ORDER:
        return True
    # What others registered with torch as having a side effect is its own to know.
    if any(torch.fx.Graph().call_function(each).is_impure(impure_random=False) for each in _choices(node)):
        return True
    return name.startswith(ASSERTIONS) or bool(node.is_impure(impure_random=False))


def _choices(node: torch.fx.Node) -> list[Any]:
    """The overloads that a call of `torch.ops.library.name` may be of, where nobody chose one yet; none of others."""
    if not hasattr(node.target, "overloads"):
        return []
    written = "out" in node.kwargs
    found = [getattr(node.target, name) for name in node.target.overloads()]
    return [each for each in found if written or not any(item.is_out for item in each._schema.arguments)]


def _name(target: object) -> str:
    """'add' for aten.add.Tensor, 'cond' for the higher-order operator."""
    schema = schema_of(target)
    return str(schema.name).rpartition("::")[2] if schema is not None else str(getattr(target, "__name__", ""))


def _namespace(target: object) -> str:
    return str(getattr(target, "namespace", ""))
