"""Sizes that change from call to call, without compiling anew.

    python examples/dynamic_shapes.py

Three ways: let torch find out at the second size, say that every size may change, or name the one that does.
"""

import torch

import ferrite


def attention(queries, keys, values):
    scores = queries @ keys.transpose(-1, -2) / queries.shape[-1] ** 0.5
    return torch.softmax(scores, -1) @ values


def compilations(dynamic, lengths, mark=False):
    """How often a function is compiled that is called with sequences of these lengths; each result is eager's."""
    torch.compiler.reset()
    before = len(ferrite.recent_compiles())
    compiled = torch.compile(attention, backend="ferrite", dynamic=dynamic)
    for length in lengths:
        inputs = [torch.randn(2, length, 16) for _ in range(3)]
        for each in inputs if mark else ():
            torch._dynamo.mark_dynamic(each, 1)
        torch.testing.assert_close(compiled(*inputs), attention(*inputs))
    return len(ferrite.recent_compiles()) - before


lengths = (8, 13, 40, 21)
print(f"{len(lengths)} lengths, each size of its own: {compilations(False, lengths)} compilations")
print(f"{len(lengths)} lengths, found out by torch:   {compilations(None, lengths)} compilations")
print(f"{len(lengths)} lengths, dynamic=True:         {compilations(True, lengths)} compilations")
print(f"{len(lengths)} lengths, one size marked:      {compilations(None, lengths, mark=True)} compilations")

record = ferrite.last_compile()
print("\nThe program has a symbol where the length was:\n")
print(record.graphs[0].source)
