"""Strides of results that AOTAutograd forgets after the forward graph has run.

A result that is the only view of what was computed is given to the user as `_unsafe_view(result, result.shape)`, which
hides from autograd that it is a view. A dimension of one then has the stride of what lies inside of it:

    y = (x * 2).T; y.relu_(); return y          sizes (2, 1, 3), strides (1, 2, 2) in eager, (1, 6, 2) after that

The strides that the forward graph gave such a result are put back, in place: autograd sees no change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.capture.torch_api import BoxedCallable
from ferrite.graph import fake_value


class ForgottenStrides:
    """Which results of one function may lose their strides, and what these were in the call under way."""

    def __init__(self) -> None:
        self.results: dict[int, int] = {}  # by the position in the graph's outputs, in the function's
        self.call = threading.local()

    def noting(self, forward: BoxedCallable, gm: torch.fx.GraphModule) -> BoxedCallable:
        """A forward that notes the strides of its results, if any may be forgotten."""
        output = gm.graph.output_node()
        hidden = torch_api.hidden_view_indices()
        for position, result in enumerate(output.args[0]):  # type: ignore[arg-type]
            index = torch_api.user_output_index(output, position)
            if index in hidden and isinstance(result, torch.fx.Node) and may_be_forgotten(fake_value(result)):
                self.results[position] = index
        if not self.results:
            return forward

        def call(args: list[Any]) -> Any:
            results = forward(args)
            self.call.strides = {index: results[position].stride() for position, index in self.results.items()}
            return results

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def restoring(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with the strides of its results put back; itself where nothing is ever forgotten."""
        if not self.results:
            return function

        def call(*args: Any) -> Any:
            results = function(*args)
            for index, strides in self.call.__dict__.pop("strides", {}).items():
                put_back(results[index], strides)
            return results

        return call


def may_be_forgotten(value: torch.Tensor) -> bool:
    """Whether a dimension may be one: the strides of all others are told by the elements."""
    return not all(torch_api.known_true(size > 1) for size in value.shape)


def put_back(result: torch.Tensor, strides: tuple[int, ...]) -> None:
    if result.stride() != strides:
        result.data = result.detach().as_strided(result.shape, strides)
