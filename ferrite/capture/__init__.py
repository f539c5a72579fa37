"""From the graph Dynamo captured to functional ATen graphs, one per direction.

In: an FX graph of torch calls with example inputs. Out: `CapturedGraph`s (forward, backward or inference) handed to a
compiler, and one callable over the compiled results. What comes out is functional except for trailing copy_ nodes
that write mutated inputs back; every node has a fake value; the backward graph comes later, from an autograd thread.
"""

from ferrite.capture.aot import CapturedGraph, GraphKind, capture

__all__ = ["CapturedGraph", "GraphKind", "capture"]
