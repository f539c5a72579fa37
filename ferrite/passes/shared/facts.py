"""Questions about nodes and sizes that several stages ask."""

from __future__ import annotations

import torch

from ferrite.capture import known_contiguous, product_libraries, torch_api
from ferrite.errors import Refusal
from ferrite.graph import HALVES, fake_value
from ferrite.machines import UNMEASURED, BesideTorch, host_machine
from ferrite.rewrite import arguments_of

aten = torch.ops.aten
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def on_cpu(value: torch.Tensor) -> bool:
    return value.device.type == "cpu"


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is at hand has no infinity and no NaN."""
    return bool(tensor.isfinite().all())


def only_cast(node: torch.fx.Node) -> torch.fx.Node | None:
    """The operand of a node that changes the dtype of a tensor and nothing else."""
    if node.target not in CASTS:
        return None
    operand, _, *rest = arguments_of(node).values()
    plain = all(value in (None, False, torch.preserve_format) for value in rest)
    return operand if plain and isinstance(operand, torch.fx.Node) else None


def transposed(node: torch.fx.Node) -> torch.fx.Node | None:
    """The matrix that a node is the transpose of."""
    if node.target not in (aten.t.default, aten.transpose.int, aten.permute.default) or fake_value(node).ndim != 2:
        return None
    source, *dims = arguments_of(node).values()
    order = dims[0] if node.target is aten.permute.default else dims or (1, 0)
    swapped = {dim % 2 for dim in order} == {0, 1} and (node.target is not aten.permute.default or order[0] % 2 == 1)
    return source if swapped else None


def has_elements_along(tensor: torch.Tensor, dim: int) -> bool:
    """Whether a dimension is there and not empty: of nothing there is no maximum, where a softmax gives nothing."""
    return tensor.ndim > 0 and torch_api.known_true(tensor.shape[dim] > 0)


def gains_nothing_by_channels_last(
    image: torch.Tensor, result: torch.Tensor, transposed: bool, groups: int
) -> Refusal | None:
    """Why a convolution on a GPU is no faster where the channels of its image lie side by side."""
    if on_cpu(image) or image.dtype not in HALVES:
        return Refusal("it is no convolution in 16 bits on a GPU")
    if image.ndim != 4 or transposed or groups != 1:
        return Refusal("it is no convolution of images, or transposed, or in groups")
    if not known_contiguous(result) or not known_contiguous(image):
        return Refusal("channels lie side by side already, or nothing does")
    return None


def leaves_quick_way(rows: int, apart: int, together: int) -> bool:
    """Whether products of so many multiplications for each row are tiny, and the one product is not."""
    machine = host_machine()
    return rows > machine.max_quick_rows and rows * apart <= machine.quick_product_multiplications < rows * together


def beside_torch() -> BesideTorch:
    """What was measured on this processor beside the library that torch gives products of float32 to."""
    return host_machine().beside_torch.get(product_libraries.in_use() or "", UNMEASURED)
