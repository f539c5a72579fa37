"""From "the numbers are wrong" to the name of what is to blame, by one command.

    python -m ferrite bisect examples/bisect_a_bug.py:check
    python examples/bisect_a_bug.py                              the same; what is found is shown, and not kept

A pass of our own has a bug. The check is a function that compiles the model and compares it with eager; the command
needs to know no more. Each try is a process of its own, and in the end the graph is made as small as it can be.
"""

import sys
import tempfile

import torch

import ferrite
from ferrite.__main__ import main

aten = torch.ops.aten


@ferrite.graph_pass(stage="post_grad")
def square_is_absolute_value(gm):
    """The square of a number is taken for its absolute value: wrong, but for 0 and 1."""
    squares = [node for node in gm.graph.nodes if node.target is aten.mul.Tensor and node.args[0] is node.args[1]]
    for node in squares:
        with gm.graph.inserting_before(node):
            node.replace_all_uses_with(gm.graph.call_function(aten.abs.default, (node.args[0],)))
        gm.graph.erase_node(node)
    return len(squares)


def model(x, w):
    h = torch.tanh(x @ w)
    spread = (h * h).mean(-1, keepdim=True)
    return torch.softmax(h / (spread + 1e-5).sqrt(), -1)


def check():
    compiled = torch.compile(model, backend="ferrite", options={"passes": [square_is_absolute_value]})
    x, w = torch.randn(16, 24), torch.randn(24, 32)
    torch.testing.assert_close(compiled(x, w), model(x, w))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = main(["bisect", f"{__file__}:check", "--into", folder])
    sys.exit(0 if found == 1 else 1)  # as the command says it: 1 is something found
