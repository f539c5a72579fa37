"""What mostly moves data: transposes, joins and cuts, padding, pooling, reading and writing by index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.cases.case import Case, normal, several, size_of

SMALL, LARGE, IMAGE, FULL_IMAGE = (64, 256), (4096, 2048), (1, 16, 32, 32), (16, 128, 64, 64)


def transpose(x: Any) -> Any:
    return x.t().contiguous()


def transpose_add(x: Any, y: Any) -> Any:
    return x.t() + y


def to_channels_last(x: Any) -> Any:
    return x.permute(0, 2, 3, 1).contiguous()


def to_channels_first(x: Any) -> Any:
    return x.permute(0, 3, 1, 2).contiguous()


def split_heads(x: Any) -> Any:
    batch, length, width = x.shape
    query, key, value = x.view(batch, length, 3, width // 192, 64).permute(2, 0, 3, 1, 4).unbind(0)
    return query.contiguous(), key.contiguous(), value.contiguous()


def merge_heads(x: Any) -> Any:
    return x.transpose(1, 2).contiguous().flatten(2)


def windows(x: Any) -> Any:
    """The shifted windows of a Swin transformer."""
    batch, height, width, channels = x.shape
    rolled = torch.roll(x, (-4, -4), (1, 2))
    parts = rolled.view(batch, height // 8, 8, width // 8, 8, channels)
    return parts.permute(0, 1, 3, 2, 4, 5).reshape(-1, 64, channels)


def cat_columns(a: Any, b: Any, c: Any, d: Any) -> Any:
    return torch.cat([a, b * 2, c, d.relu()], 1)


def cat_rows(a: Any, b: Any, c: Any, d: Any) -> Any:
    return torch.cat([a, b, c, d], 0) + 1


def split_and_gate(x: Any) -> Any:
    value, gate = x.chunk(2, -1)
    return value * torch.sigmoid(gate)


def every_other(x: Any) -> Any:
    return x[:, ::2] + x[:, 1::2]


def write_slice(x: Any, y: Any) -> Any:
    result = x.clone()
    result[:, : y.shape[1]] = y * 2
    return result


def pad(x: Any) -> Any:
    return F.pad(x, (1, 1, 1, 1))


def pad_reflect(x: Any) -> Any:
    return F.pad(x, (2, 2, 2, 2), mode="reflect")


def flip(x: Any) -> Any:
    return x.flip(-1) * 0.5


def enlarge(x: Any) -> Any:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def enlarge_bilinear(x: Any) -> Any:
    return F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)


def max_pool(x: Any) -> Any:
    return F.max_pool2d(x, 3, 2, 1)


def average_pool(x: Any) -> Any:
    return F.avg_pool2d(x, 2)


def depthwise(x: Any, weight: Any, bias: Any) -> Any:
    return F.relu6(F.conv2d(x, weight, bias, padding=1, groups=x.shape[1]))


def image_and_windows(grad: bool = False) -> Callable[..., list[Any]]:
    def make(batch: int, channels: int, size: int, window: int) -> list[Any]:
        shapes = ((batch, channels, size, size), (channels, 1, window, window), (channels,))
        return [normal(*shape, grad=grad) for shape in shapes]

    return make


def embedding(table: Any, ids: Any) -> Any:
    return F.embedding(ids, table)


def embeddings_added(table: Any, places: Any, ids: Any) -> Any:
    return F.embedding(ids, table) + places


def index_rows(x: Any, ids: Any) -> Any:
    return x[ids] * 2


def gather(x: Any, index: Any) -> Any:
    return x.gather(1, index) + 1


def scatter_add(x: Any, index: Any) -> Any:
    return torch.zeros_like(x).scatter_add(1, index, x)


def index_put(table: Any, source: Any, ids: Any) -> Any:
    return table.index_put((ids,), source, accumulate=True)


def index_add(table: Any, source: Any, ids: Any) -> Any:
    return table.index_add(0, ids, source)


def with_index(rows: int, columns: int) -> list[Any]:
    return [normal(rows, columns), torch.randint(0, columns, (rows, columns))]


def table_of(grad: bool = False) -> Callable[..., list[Any]]:
    """A table, and which of its rows."""
    return lambda rows, width, many: [normal(rows, width, grad=grad), torch.randint(0, rows, (many,))]


def table_and_places(rows: int, width: int, batch: int, length: int) -> list[Any]:
    return [normal(rows, width), normal(length, width), torch.randint(0, rows, (batch, length))]


def table_and_source(rows: int, width: int, many: int) -> list[Any]:
    return [normal(rows, width), normal(many, width), torch.randint(0, rows, (many,))]


def two_widths(rows: int, columns: int) -> list[Any]:
    return [normal(rows, columns), normal(rows, columns // 2)]


def both_ways(rows: int, columns: int) -> list[Any]:
    return [normal(rows, columns), normal(columns, rows)]


def rows_moved(inputs: list[Any], outputs: list[torch.Tensor]) -> int:
    """Rows of a table, which is the first input: as many bytes are read of it as written."""
    return size_of(inputs[1:]) + 2 * size_of(outputs)


def rows_moved_back(inputs: list[Any], outputs: list[torch.Tensor]) -> int:
    """Rows read and written; then gradients of rows read, and that of the whole table written."""
    return 2 * size_of(inputs[1:]) + 3 * size_of(outputs) + size_of(inputs[:1])


def moving(name: str, function: Any, make: Any, small: Any, large: Any, **settings: Any) -> Case:
    return Case(name, "layout", function, make, small, large, **settings)


def index(name: str, function: Any, make: Any, small: Any, large: Any, **settings: Any) -> Case:
    return Case(name, "index", function, make, small, large, **settings)


MOVING: tuple[Case, ...] = (
    moving("transpose", transpose, several(1), (128, 128), LARGE),
    moving("transpose-add", transpose_add, both_ways, (128, 128), (2048, 4096)),
    moving("nchw-to-nhwc", to_channels_last, several(1), IMAGE, FULL_IMAGE),
    moving("nhwc-to-nchw", to_channels_first, several(1), (1, 32, 32, 16), (16, 64, 64, 128)),
    moving("heads-split", split_heads, several(1), (1, 64, 768), (4, 1024, 2304)),
    moving("heads-merge", merge_heads, several(1), (1, 4, 64, 64), (8, 16, 1024, 64)),
    moving("windows-shifted", windows, several(1), (1, 16, 16, 32), (8, 64, 64, 256)),
    moving("cat-columns", cat_columns, several(4), (64, 64), (4096, 512)),
    moving("cat-rows", cat_rows, several(4), (64, 64), (1024, 2048)),
    moving("split-gate", split_and_gate, several(1), SMALL, (4096, 3072)),
    moving("slice-strided", every_other, several(1), SMALL, (4096, 3072)),
    moving("slice-write", write_slice, two_widths, SMALL, LARGE),
    moving("pad", pad, several(1), IMAGE, FULL_IMAGE),
    moving("pad-reflect", pad_reflect, several(1), IMAGE, FULL_IMAGE),
    moving("flip", flip, several(1), SMALL, LARGE),
    moving("enlarge", enlarge, several(1), IMAGE, (16, 64, 64, 64)),
    moving("enlarge-bilinear", enlarge_bilinear, several(1), IMAGE, (16, 64, 64, 64)),
    moving("max-pool", max_pool, several(1), IMAGE, (16, 64, 128, 128)),
    moving("average-pool", average_pool, several(1), IMAGE, (16, 64, 128, 128)),
    moving("depthwise", depthwise, image_and_windows(), (1, 8, 16, 3), (16, 128, 64, 3)),
    moving(
        "depthwise-backward", depthwise, image_and_windows(grad=True), (1, 8, 16, 3), (8, 128, 64, 3), backward=True
    ),
    index("embedding", embedding, table_of(), (1000, 64, 128), (32000, 512, 32768), moved=rows_moved),
    index(
        "embedding-backward",
        embedding,
        table_of(True),
        (1000, 64, 128),
        (16384, 512, 16384),
        backward=True,
        moved=rows_moved_back,
    ),
    index(
        "embedding-places",
        embeddings_added,
        table_and_places,
        (1000, 64, 2, 64),
        (32000, 512, 32, 512),
        moved=rows_moved,
    ),
    index("index-rows", index_rows, table_of(), (256, 64, 128), (16384, 512, 16384), moved=rows_moved),
    index("gather", gather, with_index, SMALL, (2048, 2048)),
    index("scatter-add", scatter_add, with_index, SMALL, (2048, 2048)),
    index("index-put-accumulate", index_put, table_and_source, (256, 64, 512), (8192, 512, 16384)),
    index("index-add", index_add, table_and_source, (256, 64, 512), (8192, 512, 16384)),
)
