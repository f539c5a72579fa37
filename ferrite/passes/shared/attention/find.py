"""Find attention in a graph: from the last product back to the softmax, and on to the first product."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ferrite.errors import NotApplied
from ferrite.graph import has_effect
from ferrite.passes.shared.attention.found import (
    Change,
    Dropout,
    FoundAttention,
    FoundStep,
    Node,
    ScoreProduct,
    same_count,
    source_of,
)
from ferrite.passes.shared.attention.spellings import SCORES, SHAPES, WEIGHTS, SpellingTable, product_at, softmax_at

MAX_SPELLINGS_BETWEEN = 24  # spellings between a product and the softmax; no real model comes near
End = TypeVar("End")


def find_attention(root: Node) -> FoundAttention:
    """The attention whose result a node is; raises NotApplied with the reason why it is none."""
    last = last_product(root)
    weights, softmax = walk(last.left, WEIGHTS, softmax_at, "softmax")
    scores, first = walk(softmax.inner, SCORES, product_at, "product")
    if not in_order(last.left_order):
        raise NotApplied("the weights are transposed")
    if not in_order(first.result_order):
        raise NotApplied("the scores are transposed")
    changes: list[tuple[Node, Change]] = [(first.node, change) for change in first.then]
    changes += [(step.node, step.meaning) for step in reversed(scores)]
    found = FoundAttention(root, first, changes, softmax, last, dropout=dropout_of(weights))
    found.inside = [node for step in (*scores, softmax, *weights) for node in step.nodes]
    found.inside += [first.node, *([last.node] if last.node is not root else [])]
    check_closed(found)
    return found


def in_order(dims: tuple[int, ...]) -> bool:
    return dims == tuple(range(len(dims)))


def last_product(root: Node) -> ScoreProduct:
    """The node itself, or the product of which it is another shape."""
    source = source_of(root) if root.target in SHAPES else root
    found = product_at(source) if source is not None else None
    if found is None or found.then:
        raise NotApplied("it is no product of two factors")
    return found


def dropout_of(weights: list[FoundStep]) -> float:
    dropouts = [step.meaning for step in weights if isinstance(step.meaning, Dropout)]
    chances = [each.probability for each in dropouts if each.train is not False and each.probability != 0]
    if len(chances) > 1:
        raise NotApplied("weights are dropped more than once")
    if any(each.train is not True for each in dropouts if each.train is not False):
        raise NotApplied("whether weights are dropped is known only when it runs")
    if any(not isinstance(chance, (int, float)) for chance in chances):
        raise NotApplied("how many weights are dropped is known only when it runs")
    return float(sum(chances))


def walk(
    start: Node, table: SpellingTable, end_at: Callable[[Node], End | None], goal: str
) -> tuple[list[FoundStep], End]:
    """The first way back from a node to an end, from the outside in. No step may make more of the numbers."""
    hopeless: set[Node] = set()
    stuck = start

    def search(node: Node, left: int) -> tuple[list[FoundStep], End] | None:
        nonlocal stuck
        if (end := end_at(node)) is not None:
            return [], end
        if node in hopeless or not left:
            return None
        for step in table.steps(node):
            rest = search(step.inner, left - 1) if same_count(step.inner, node) else None
            if rest is not None:
                return [step, *rest[0]], rest[1]
        hopeless.add(node)
        stuck = node
        return None

    found = search(start, MAX_SPELLINGS_BETWEEN)
    if found is None:
        raise NotApplied(f"{stuck.name} leads to no {goal}")
    return found


def check_closed(found: FoundAttention) -> None:
    """Nobody else may read what is no longer computed. What only such calls read, or nobody, goes with it."""
    inside = {*found.inside, found.root}
    waiting = list(found.inside)
    while waiting:
        node = waiting.pop()
        for reader in node.users:
            if reader in inside:
                continue
            if not serves_only(reader, inside):
                raise NotApplied(f"{node.name} is read by {reader.name}, too")
            inside.add(reader)
            found.inside.append(reader)
            waiting.append(reader)


def serves_only(node: Node, inside: set[Node], steps: int = 4) -> bool:
    """Whether nothing outside depends on a node."""
    if node in inside:
        return True
    if has_effect(node) or (node.users and not steps):
        return False
    return all(serves_only(user, inside, steps - 1) for user in node.users)
