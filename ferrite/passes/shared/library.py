"""Operators of our own, which rules rewrite to: `torch.ops.ferrite`.

Each has a reference in plain ATen. It runs where no code generator knows the operator, and on fake values it is what
shape, strides and dtype are taken from, so that the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferrite.capture import register_fake

# A fragment: others may add operators to the namespace. The library lives as long as this module.
LIBRARY = torch.library.Library("ferrite", "FRAGMENT")


def define(
    schema: str, look: Callable[..., Any] | None = None, *, draws: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a reference under a schema, for real and for fake values; `look`: for fake values instead.

    `draws`: it takes from a random generator, so that no two calls are one and none may be left out.
    """
    tags = (torch.Tag.pt2_compliant_tag, *((torch.Tag.nondeterministic_seeded,) if draws else ()))

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        LIBRARY.define(schema, tags=tags)
        LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        register_fake(LIBRARY, name, look or reference)
        return reference

    return register


def differentiate(name: str, backward: Callable[..., Any], keep: Callable[..., None]) -> None:
    """Tell autograd the gradients of an operator; `keep(ctx, inputs, output)` saves what `backward` needs."""
    torch.library.register_autograd(f"ferrite::{name}", backward, setup_context=keep, lib=LIBRARY)
