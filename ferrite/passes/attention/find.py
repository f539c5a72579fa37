"""Find attention in a graph: from the last product back to the softmax, and on to the first product."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from ferrite.graph.regions import has_effect
from ferrite.passes.attention.found import (
    Attention,
    Change,
    Dropout,
    Node,
    Nothing,
    Product,
    Refused,
    Softmax,
)
from ferrite.passes.attention.steps import SCORES, SHAPES, WEIGHTS, Reading, product_of, softmax_of
from ferrite.rewrite.arguments import arguments_of

MOST_STEPS = 24  # calls between a product and the softmax; no real model comes near
Path = list[tuple[Node, Change]]  # calls with what they do, from the outside in


def find_attention(root: Node) -> Attention:
    """The attention whose result a node is; raises Refused with the reason why it is none."""
    weights_product = last_product(root)
    weights, softmax = weights_of(weights_product)
    scores, scores_product = scores_of(softmax.scores)
    changes = [(scores_product.node, change) for change in scores_product.steps]
    dropouts = [change.probability for _, change in weights if isinstance(change, Dropout)]
    if len(dropouts) > 1:
        raise Refused("weights are dropped more than once")
    found = Attention(
        root,
        scores_product,
        changes + scores[::-1],
        softmax,
        weights_product,
        dropout=sum(dropouts),
        inside=[*(node for node, _ in scores), scores_product.node, *softmax.nodes, *inner_nodes(weights)],
    )
    if weights_product.node is not root:
        found.inside.append(weights_product.node)
    check_closed(found)
    return found


def last_product(root: Node) -> Product:
    """The node itself, or the product of which it is another shape."""
    node = root
    if root.target in SHAPES:
        inner = root.args[0]
        if not isinstance(inner, Node) or product_of(inner) is None:
            raise Refused("it is no other shape of a product")
        node = inner
    found = product_of(node)
    if found is None or found.steps:
        raise Refused("it is no product of two factors")
    return found


def weights_of(product: Product) -> tuple[Path, Softmax]:
    if product.left_order != tuple(range(len(product.left_order))):
        raise Refused("the weights are transposed")
    path = walk(product.left, WEIGHTS, lambda node: softmax_of(node) is not None, "a softmax")
    node = path.pop()[0]
    softmax = softmax_of(node)
    assert softmax is not None
    return path, softmax


def scores_of(node: Node) -> tuple[Path, Product]:
    path = walk(node, SCORES, lambda node: product_of(node) is not None, "a product")
    product = product_of(path.pop()[0])
    assert product is not None
    if product.result_order != tuple(range(len(product.result_order))):
        raise Refused("the scores are transposed")
    return path, product


def walk(start: Node, table: Mapping[Any, Reading], is_end: Any, goal: str) -> Path:
    """The first way back from a node to an end; its last entry is the end itself."""
    hopeless: set[Node] = set()
    stuck = start

    def search(node: Node, steps: int) -> Path | None:
        nonlocal stuck
        if is_end(node):
            return [(node, Nothing())]
        if node in hopeless or not steps:
            return None
        read = table.get(node.target)
        for step in read(node, arguments_of(node)) if read is not None else ():
            rest = search(step.inner, steps - 1)
            if rest is not None:
                return [(node, step.change), *rest]
        hopeless.add(node)
        stuck = node
        return None

    found = search(start, MOST_STEPS)
    if found is None:
        raise Refused(f"{stuck.name} leads to no {goal.partition(' ')[2]}")
    return found


def inner_nodes(path: Path) -> Iterator[Node]:
    """The calls of a path, and those whose results they take out."""
    for node, _ in path:
        yield node
        if node.target is operator.getitem and isinstance(source := node.args[0], Node):
            yield source


def check_closed(found: Attention) -> None:
    """Nobody else may read what is no longer computed; what only dead calls read is dead, too."""
    inside = {*found.inside, found.root}
    waiting = list(found.inside)
    while waiting:
        node = waiting.pop()
        for reader in node.users:
            if reader in inside:
                continue
            if not is_dead(reader):
                raise Refused(f"{node.name} is read by {reader.name}, too")
            inside.add(reader)
            found.inside.append(reader)
            waiting.append(reader)
    for _, change in found.scores:
        tensors = (getattr(change, name, None) for name in ("mask", "condition", "tensor"))
        if any(tensor in inside for tensor in tensors):
            raise Refused("the scores mask themselves")


def is_dead(node: Node, steps: int = 4) -> bool:
    if has_effect(node) or (node.users and not steps):
        return False
    return all(is_dead(user, steps - 1) for user in node.users)
