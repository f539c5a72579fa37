"""Views as loop programs: index maps that cost nothing, and strided views of memory."""

from __future__ import annotations

import pytest
import torch

from ferrite.ir.program.nodes import Bind
from tests.compare import assert_same_as_eager
from tests.lower.lowered import assert_interpreted_as_eager, eager_calls, kinds, operations, program_of

pytestmark = pytest.mark.quick
aten = torch.ops.aten


def test_a_slice_of_a_sum_is_one_loop_over_its_rows():
    program = program_of(lambda a: (a + 1)[2:5] * 2, torch.randn(8, 4))
    assert kinds(program) == ["compute"]
    assert [int(str(axis.extent)) for axis in program.operations[0].axes] == [3, 4]


def test_parts_of_a_split_are_computed_where_they_are_used():
    program = program_of(lambda a: [part.sin() for part in (a + 1).split(2)], torch.randn(6, 3))
    assert kinds(program) == ["compute"] * 3


def test_a_chain_of_views_is_one_loop():
    def fn(a):
        return (a.t().reshape(-1, 2).unsqueeze(0).expand(3, 16, 2) + 1).permute(2, 0, 1).contiguous()

    assert kinds(program_of(fn, torch.randn(8, 4))) == ["compute"]


@pytest.mark.lengthy
def test_every_view_agrees_with_eager():
    def fn(a):
        return (
            a.diagonal(1, 0, 2).clone(),
            a.diagonal(-1).clone(),
            a.unfold(1, 2, 1).sum(-1),
            a.squeeze().clone(),
            a.movedim(0, 2) + 1,
            [part + 1 for part in a.unbind(1)],
            [part + 1 for part in a.chunk(3, 1)],
            a.select(2, -1) + 1,
            a[..., ::2] * 2,
            a[1:-1] + 1,
            [part * 2 for part in a.tensor_split(2, 1)],
            a.flatten(1) + 1,
            a.unflatten(1, (2, 2)) + 1,
            a.swapaxes(0, 1) + 1,
        )

    assert_interpreted_as_eager(fn, lambda: [torch.randn(3, 4, 5)])
    assert not eager_calls(program_of(fn, torch.randn(3, 4, 5)))


@pytest.mark.parametrize("shape", [(3, 4), (4, 3)])
def test_reshapes_of_symbolic_sizes_need_no_call(shape):
    def fn(a):
        return (a.t().reshape(-1) + 1).view(a.shape[0], a.shape[1]).sum(), a.flatten() * 2

    assert not eager_calls(program_of(fn, torch.randn(*shape), dynamic=True))


@pytest.mark.lengthy
def test_one_program_serves_every_size():
    def fn(a):
        return (a.t().reshape(-1) + 1).view(a.shape[0], a.shape[1]), a[1:], a[:, -2:] + 1, a[2], a.unfold(0, 2, 1) + 1

    assert_interpreted_as_eager(fn, lambda: [torch.randn(5, 6)], dynamic=True)
    compiled = torch.compile(
        fn, backend="ferrite", dynamic=True, options={"strict": True, "executor": "interpreter"}, fullgraph=True
    )
    compiled(torch.randn(5, 6))
    with torch.compiler.set_stance("fail_on_recompile"):
        for shape in [(7, 4), (9, 3)]:
            a = torch.randn(shape)
            torch.testing.assert_close(compiled(a), fn(a))


@pytest.mark.parametrize("start", [-3, 0, 2, 9, -9])
@pytest.mark.lengthy
def test_a_slice_whose_start_is_data_is_bounded_when_it_runs(start):
    @torch._dynamo.config.patch(capture_scalar_outputs=True)
    def run():
        def fn(a, i):
            return a[i.item() :].sum()

        assert_interpreted_as_eager(fn, lambda: [torch.randn(8), torch.tensor(start)])

    run()


@pytest.mark.parametrize("index", [-2, 0, 3])
def test_an_element_whose_number_is_data_counts_from_the_end_where_negative(index):
    @torch._dynamo.config.patch(capture_scalar_outputs=True)
    def run():
        assert_interpreted_as_eager(lambda a, i: a[i.item()] + 1, lambda: [torch.randn(4, 3), torch.tensor(index)])

    run()


def test_as_strided_is_a_view_of_the_buffer():
    program = program_of(lambda a: torch.as_strided(a + 1, (2, 2), (1, 2), 1), torch.randn(3, 4))
    assert kinds(program) == ["compute"]
    assert [buffer.kind for buffer in program.buffers] == ["input", "owned", "view"]


BASES = {
    "all of an input": lambda a: a,
    "a part": lambda a: (a + 1)[3:12],
    "a part, turned": lambda a: (a + 1)[3:12].view(3, 3).t(),
    "every other element": lambda a: (a + 1)[::2],
}


@pytest.mark.parametrize("offset", [None, 0, 4])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.lengthy
def test_as_strided_scatter_writes_over_places_of_the_storage(base, offset):
    """Eager copies all of the storage, and some of the places that are written need not be elements of the tensor."""

    def fn(a, part):
        return torch.as_strided_scatter(BASES[base](a), part, (2, 2), (1, 2), offset)

    # a tensor whose storage begins elsewhere than it: Dynamo has no guard on that
    assert_same_as_eager(fn, lambda: [torch.arange(26.0)[5:25], -torch.ones(2, 2)])


def test_as_strided_scatter_among_the_elements_of_a_tensor_is_a_loop():
    program = program_of(
        lambda a, b: torch.as_strided_scatter(a + 1, b, (2, 2), (1, 2), 4), *map(torch.randn, (9, (2, 2)))
    )
    assert not eager_calls(program)


def test_as_strided_counts_from_the_beginning_of_the_storage():
    def make():
        return [torch.arange(20.0)[5:]]

    program = program_of(lambda a: torch.as_strided(a, (2, 2), (1, 2), 1) * 2, *make())
    assert len(operations(program, Bind)) == 1
    assert_interpreted_as_eager(lambda a: torch.as_strided(a, (2, 2), (1, 2), 1) * 2, make)


def test_bits_are_reinterpreted_inside_the_loop():
    program = program_of(lambda a: (a + 1).view(torch.int32) + 1, torch.randn(8))
    assert kinds(program) == ["compute"]


@pytest.mark.parametrize("dtype", [torch.int16, torch.float64, torch.uint8, torch.complex64])
def test_elements_of_another_width_are_a_view(dtype):
    assert_interpreted_as_eager(
        lambda a: ((a + 1).view(dtype), a.view(dtype).clone()), lambda: [torch.randn(3, 8)], exact=False
    )


def test_replacing_a_part_is_one_loop():
    def fn(a, b):
        c = a * 2
        return (
            aten.slice_scatter(c, b, 0, 1, 6, 2),
            aten.select_scatter(c, b[0], 0, -1),
            aten.diagonal_scatter(c, b[0], -1),
            aten.slice_scatter(c, b, 0, -5, None, 2),
        )

    inputs = torch.randn(6, 4), torch.randn(3, 4)
    assert_interpreted_as_eager(fn, lambda: list(inputs))
    program = program_of(fn, *inputs)
    assert kinds(program) == ["compute"] * 4


def test_gradients_of_views_are_lowered():
    def fn(a):
        parts = a[1:5:2].sum() + a.select(1, 2).sin().sum() + a.diagonal(1).exp().sum() + a.unfold(0, 3, 2).cos().sum()
        return parts + a.as_strided((2, 2), (1, 2), 1).sum()

    assert_interpreted_as_eager(fn, lambda: [torch.randn(6, 4, requires_grad=True)], backward=True)


def test_metadata_changed_in_place_leaves_values():
    def fn(a):
        y = a + 1
        z = y.t_()
        return z * 2, y.unsqueeze_(0).squeeze_(0)

    assert_interpreted_as_eager(fn, lambda: [torch.randn(3, 4)])
