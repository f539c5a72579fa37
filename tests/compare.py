"""Differential testing: one function run in eager, compiled and in float64; everything observable is compared.

`assert_same_as_eager(fn, make_inputs)` is the whole contract in one call. What it compares between eager and
compiled: the structure of the result (containers, dataclasses, None, numbers), and for every tensor in it the values,
dtype, shape, strides, device, requires_grad; which results are, or share storage with, each other, the inputs and the
module's state, and at which offset; the contents of the inputs and of the state after the call; the state of
the random generator after the call; with `backward=True` also the gradients of every input and parameter.

Values are judged against a float64 run: ours may be no farther from it than eager's, within a small factor.
Where no float64 run makes sense (`exact=False`: random numbers, bit tricks), values must be equal to the bit.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
UPCAST = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
WIDEST = (torch.float64, torch.complex128)
SAME_WIDTH_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compile_strict(fn: Any, *, options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """`torch.compile` with the backend under test; an internal failure raises instead of running in eager."""
    return torch.compile(fn, backend="ferrite", options={"strict": True, **(options or {})}, **kwargs)


def since(*version: int) -> pytest.MarkDecorator:
    """For what torch itself cannot do, under any backend, before a version."""
    return pytest.mark.skipif(version > RELEASE, reason=f"torch {torch.__version__} itself cannot")


def compiled_graphs() -> int:
    """How many graphs the backend has been given since the last reset of the counters (see `assert_same_as_eager`)."""
    return int(counters["stats"]["unique_graphs"])


def reset() -> None:
    """Forget everything compiled, and start counting graphs anew."""
    torch.compiler.reset()
    counters.clear()


def assert_same_as_eager(
    fn: Callable[..., Any],
    make_inputs: Callable[[], Sequence[Any]],
    *,
    prepare: Callable[..., Sequence[Any]] | None = None,
    backward: bool = False,
    exact: bool = True,
    seed: int = 0,
    calls: int = 1,
    graphs: int | None = None,
    terms: float = 0.0,
    **compile_kwargs: Any,
) -> Any:
    """Assert that the compiled `fn` cannot be told from `fn`; returns the compiled function.

    `make_inputs` builds fresh positional arguments on every call (seeded, so each run sees the same ones).
    `prepare`, run in eager, turns them into the arguments: views of them, copies with a gradient history.
    `fn` may be a module: each run gets its own deep copy. `calls` repeats the call (and its backward) with the
    same arguments, to see state that accumulates: buffers, mutated inputs, gradients. `graphs` is the number of
    graphs the backend must have been given; by default at least one, so nothing passes by running in eager.
    `terms`, for functions that add up numbers of both signs: how large those numbers are. A sum in another order than
    eager's is rounded relative to them, and the result may be far smaller than they are.
    """
    reset()
    settings: dict[str, Any] = {"prepare": prepare, "backward": backward, "seed": seed, "calls": calls}
    eager = run(fn, make_inputs, **settings)
    reference = run(fn, make_inputs, upcast=True, **settings) if exact else None
    compiled: list[Any] = []

    def compile_copy(own: Any) -> Any:
        compiled.append(compile_strict(own, **compile_kwargs))
        return compiled[0]

    counters.clear()  # eager runs of control flow operators compile something of their own
    ours = run(fn, make_inputs, wrap=compile_copy, **settings)
    assert_same_run(ours, eager, reference, terms)
    if graphs is None:
        assert compiled_graphs() > 0, "nothing was compiled"
    else:
        assert compiled_graphs() == graphs, f"{compiled_graphs()} graphs were compiled instead of {graphs}"
    return compiled[0]


@dataclasses.dataclass
class Run:
    """Everything one run lets a caller observe."""

    outputs: Any
    inputs: list[Any]
    state: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    rng: torch.Tensor


def run(
    fn: Any,
    make_inputs: Callable[[], Sequence[Any]],
    *,
    prepare: Callable[..., Sequence[Any]] | None,
    backward: bool,
    seed: int,
    calls: int,
    upcast: bool = False,
    wrap: Callable[[Any], Any] = lambda fn: fn,
) -> Run:
    torch.manual_seed(seed)
    inputs = list(make_inputs())
    own = copy.deepcopy(fn) if isinstance(fn, torch.nn.Module) else fn
    if upcast:
        inputs = upcast_tree(inputs)
        own = own.double() if isinstance(own, torch.nn.Module) else own
    arguments = list(prepare(*inputs)) if prepare else inputs
    call = wrap(own)
    torch.manual_seed(seed + 1)
    for _ in range(calls):
        outputs = call(*arguments)
        if backward:
            loss_of(outputs).backward()
    rng = random_state()
    gradients: dict[str, torch.Tensor | None] = {}
    state: dict[str, torch.Tensor] = {}
    if backward:
        gradients = {f"input {i}": leaf.grad for i, leaf in enumerate(tensors_in(inputs)) if leaf.is_leaf}
    if isinstance(own, torch.nn.Module):
        state = dict(own.state_dict())
        if backward:
            gradients |= {name: parameter.grad for name, parameter in own.named_parameters()}
    return Run(outputs, [inputs, arguments] if prepare else inputs, state, gradients, rng)


def random_state() -> torch.Tensor:
    """Of all default generators that are in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def loss_of(outputs: Any) -> torch.Tensor:
    """A scalar that weighs every element of every differentiable output differently."""
    parts = []
    for i, tensor in enumerate(t for t in tensors_in(outputs) if t.requires_grad):
        real = torch.view_as_real(tensor.resolve_conj()).sum(-1) if tensor.is_complex() else tensor
        weight = torch.linspace(0.5, 1.5, real.numel(), dtype=torch.float64, device=real.device).reshape(real.shape)
        parts.append((real * weight.to(real.dtype)).sum() * (i + 1))
    assert parts, "backward=True, but no output requires grad"
    return torch.stack([part.to(torch.float64) for part in parts]).sum()


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(plain(tree)) if isinstance(leaf, torch.Tensor)]


def plain(tree: Any) -> Any:
    """Dataclasses, which pytree takes for leaves, as pairs of their type and a dictionary of their fields."""

    def open_up(leaf: Any) -> Any:
        if not is_dataclass_value(leaf):
            return leaf
        return type(leaf), {f.name: plain(getattr(leaf, f.name)) for f in dataclasses.fields(leaf)}

    return pytree.tree_map(open_up, tree, is_leaf=is_dataclass_value)


def is_dataclass_value(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def upcast_tree(tree: Any) -> Any:
    """Upcast every tensor, keeping strides, sharing among inputs and autograd flags."""
    bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def upcast(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or is_subclass(leaf) or leaf.is_meta or leaf.dtype not in UPCAST:
            return leaf
        if leaf.layout is not torch.strided:
            return leaf.to(UPCAST[leaf.dtype])
        key = (leaf.untyped_storage()._cdata, leaf.dtype)
        if key not in bases:
            count = leaf.untyped_storage().nbytes() // leaf.element_size()
            flat = torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(leaf.untyped_storage(), 0, (count,), (1,))
            bases[key] = flat.to(UPCAST[leaf.dtype])
        wide = bases[key].as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
        wide = torch._neg_view(wide) if leaf.is_neg() else wide
        wide = wide.conj() if leaf.is_conj() else wide
        return wide.requires_grad_(leaf.requires_grad)

    memo: dict[int, Any] = {}
    return pytree.tree_map(lambda leaf: memo.setdefault(id(leaf), upcast(leaf)), tree)


def assert_same_run(ours: Run, eager: Run, reference: Run | None, terms: float = 0.0) -> None:
    for what in ("outputs", "inputs", "state", "gradients"):
        mine, theirs = getattr(ours, what), getattr(eager, what)
        assert_same_tree(mine, theirs, reference and getattr(reference, what), what, terms)
    assert sharing(ours) == sharing(eager), "sharing among inputs, outputs and state differs from eager's"
    assert torch.equal(ours.rng, eager.rng), "random generator state differs from eager's after the call"


def sharing(run: Run) -> list[tuple[int, int, int]]:
    """For every tensor: which object and which storage (numbered by first sight), and the offset in bytes."""
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    found = []
    for tensor in tensors_in((run.inputs, run.state, run.outputs)):
        number = objects.setdefault(id(tensor), len(objects))
        if tensor.layout is not torch.strided or is_wrapper(tensor):
            found.append((number, -1, 0))
            continue
        storage = storages.setdefault(tensor.untyped_storage()._cdata, len(storages))
        found.append((number, storage, tensor.storage_offset() * tensor.element_size()))
    return found


def is_subclass(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """A tensor without storage of its own, made of other tensors."""
    return hasattr(tensor, "__tensor_flatten__")


def assert_same_tree(ours: Any, eager: Any, reference: Any, what: str, terms: float = 0.0) -> None:
    our_leaves, our_spec = pytree.tree_flatten(plain(ours))
    eager_leaves, eager_spec = pytree.tree_flatten(plain(eager))
    assert our_spec == eager_spec, f"{what}: structure {our_spec} differs from eager's {eager_spec}"
    exact_leaves = [None] * len(eager_leaves) if reference is None else pytree.tree_leaves(plain(reference))
    assert len(exact_leaves) == len(eager_leaves), f"{what}: the float64 run has another structure"
    for i, (mine, theirs, exact) in enumerate(zip(our_leaves, eager_leaves, exact_leaves, strict=True)):
        where = f"{what}[{i}]"
        assert type(mine) is type(theirs), f"{where}: {type(mine)} instead of {type(theirs)}"
        if isinstance(theirs, torch.Tensor):
            assert_same_tensor(mine, theirs, exact, where, terms)
        else:
            both_nan = isinstance(theirs, float) and mine != mine and theirs != theirs
            assert both_nan or mine == theirs, f"{where}: {mine!r} instead of {theirs!r}"


def assert_same_tensor(
    ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor | None, where: str, terms: float = 0.0
) -> None:
    for fact in ("dtype", "shape", "device", "layout", "requires_grad", "is_leaf"):
        mine, theirs = getattr(ours, fact), getattr(eager, fact)
        assert mine == theirs, f"{where}: {fact} {mine} instead of {theirs}"
    if is_wrapper(eager):
        for name in eager.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            inner = None if exact is None else getattr(exact, name)
            assert_same_tensor(getattr(ours, name), getattr(eager, name), inner, f"{where}.{name}", terms)
        return
    if eager.layout is not torch.strided:
        ours, eager, exact = ours.to_dense(), eager.to_dense(), None if exact is None else exact.to_dense()
    assert ours.stride() == eager.stride(), f"{where}: strides {ours.stride()} instead of {eager.stride()}"
    assert ours.is_conj() == eager.is_conj(), f"{where}: conjugate bit"
    assert ours.is_neg() == eager.is_neg(), f"{where}: negative bit"
    assert ours.is_neg() == eager.is_neg(), f"{where}: negative bit"
    if eager.is_meta:
        return
    if exact is not None and eager.dtype in UPCAST:
        assert_no_farther(ours, eager, exact, where, terms)
    elif exact is not None and eager.dtype in WIDEST:  # nothing wider to judge by: eager is the reference
        assert_no_farther(ours, eager, eager, where, terms)
    else:
        assert torch.equal(as_bits(ours), as_bits(eager)), f"{where}: values differ from eager's"


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of every element, with one and the same pattern for every NaN."""
    dense = as_real(tensor).contiguous()
    if dense.is_floating_point():
        bits = dense.view(SAME_WIDTH_INT[dense.element_size()])
        # float8 has no isnan of its own; float32 holds each of its values
        isnan = dense.isnan() if dense.element_size() > 1 else dense.to(torch.float32).isnan()
        return bits.masked_fill(isnan, 77)
    return dense


def assert_no_farther(
    ours: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    where: str,
    terms: float = 0.0,
    factor: float = 2.0,
    ulps: float = 4.0,
) -> None:
    """Ours may miss the exact value by `factor` times eager's worst miss plus `ulps` units in the last place, of the
    largest result or of the `terms` that were added up to it."""
    mine, theirs, true = (as_real(t).to(torch.float64) for t in (ours, eager, exact))
    assert torch.equal(mine.isnan(), theirs.isnan()), f"{where}: NaN in other places than in eager"
    assert torch.equal(mine == torch.inf, theirs == torch.inf), f"{where}: infinity in other places"
    assert torch.equal(mine == -torch.inf, theirs == -torch.inf), f"{where}: minus infinity in other places"
    finite = theirs.isfinite() & true.isfinite()
    mine, theirs, true = mine[finite], theirs[finite], true[finite]
    if mine.numel() == 0:
        return
    unit = torch.finfo(eager.dtype).eps * max(true.abs().max().item(), terms) + torch.finfo(eager.dtype).tiny
    allowed = factor * (theirs - true).abs().max().item() + ulps * unit
    worst = (mine - true).abs().max().item()
    assert worst <= allowed, f"{where}: off by {worst:.3g}, eager by {(theirs - true).abs().max().item():.3g}"


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor of real numbers with the same values."""
    dense = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return torch.view_as_real(dense) if dense.is_complex() else dense


# --- tables of cases --------------------------------------------------------------------------------------------------


def wide_table(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Parameters (name, dynamic): the quick ones with known and symbolic sizes, the symbolic half of the others in the
    long sweeps."""

    def mark(name: str, dynamic: bool) -> list[Any]:
        if name in quick:
            return [pytest.mark.quick]
        return [pytest.mark.slow] if dynamic else []

    pairs = itertools.product(names, (False, True))
    return [
        pytest.param(*pair, id=f"{pair[0]}-{'dynamic' if pair[1] else 'static'}", marks=mark(*pair)) for pair in pairs
    ]
