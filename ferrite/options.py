"""Every setting of the compiler, in one frozen, typed, documented object.

A setting can be given in five places; the more local one wins:

    1. an explicit option      torch.compile(..., options={"strict": True}), ferrite.compile(..., strict=True)
    2. a mode                  torch.compile(..., mode="max-autotune"): a named preset, see MODES
    3. a context manager       with ferrite.using(strict=True): ...   (what is compiled while it is active)
    4. the environment         FERRITE_STRICT=1
    5. the default             below

Code receives an `Options`; it never reads the environment. `changes_code` says whether a setting can change the code
that is generated, and so belongs to the cache key.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import importlib
import operator
import os
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ferrite.errors import UserError, nearest

# The stages of one compilation, in order. They name times in the record, and failures.
Stage = Literal["capture", "partition", "post_grad", "lower", "codegen", "load"]
STAGES: tuple[str, ...] = typing.get_args(Stage)


def option(default: Any, *, env: str, changes_code: bool, doc: str) -> Any:
    metadata = {"env": env, "changes_code": changes_code, "doc": doc}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of one compilation. Unknown names and ill-typed values are a UserError.

    >>> Options(strict=True).strict
    True
    """

    strict: bool = option(
        False,
        env="FERRITE_STRICT",
        changes_code=False,
        doc="Raise a CompilerBug when a stage fails, instead of running that graph in eager with a warning.",
    )
    decompose: Literal["spelling", "core"] = option(
        "spelling",
        env="FERRITE_DECOMPOSE",
        changes_code=True,
        doc="How far operators are taken apart while capturing. `spelling`: only into another spelling that runs the "
        "same kernels, so that eager calls stay whole. `core`: down to the core ATen operators.",
    )
    partition: Literal["min-cut", "save-all"] = option(
        "min-cut",
        env="FERRITE_PARTITION",
        changes_code=True,
        doc="What the forward graph saves for the backward graph. `min-cut`: the fewest bytes, recomputing cheap "
        "operators. `save-all`: everything the backward graph reads, recomputing nothing.",
    )
    max_autotune: bool = option(
        False,
        env="FERRITE_MAX_AUTOTUNE",
        changes_code=True,
        doc="Measure alternative kernels while compiling and keep the fastest. No effect on CPU yet.",
    )
    cuda_graphs: bool = option(
        False,
        env="FERRITE_CUDA_GRAPHS",
        changes_code=True,
        doc="Record GPU work once and replay it, to save launch overhead. No effect on CPU.",
    )
    post_grad: bool = option(
        True,
        env="FERRITE_POST_GRAD",
        changes_code=True,
        doc="Run the post-grad passes.",
    )
    skip: tuple[str, ...] = option(
        (),
        env="FERRITE_SKIP",
        changes_code=True,
        doc="Names of passes that are not run (in the environment: separated by commas).",
    )
    fuel: int | None = option(
        None,
        env="FERRITE_FUEL",
        changes_code=True,
        doc="Stop rewriting after so many rewrites: a wrong one is found by halving.",
    )
    passes: tuple[Any, ...] = option(
        (),
        env="FERRITE_PASSES",
        changes_code=True,
        doc="Passes of your own, made with `ferrite.graph_pass`; in the environment `module:name`, with commas.",
    )
    post_grad_custom_pre_pass: Any = option(
        (),
        env="FERRITE_POST_GRAD_CUSTOM_PRE_PASS",
        changes_code=True,
        doc="A callable on the graph, or a list of them, run before the post-grad rewrites; in the environment "
        "`module:name`.",
    )
    post_grad_custom_post_pass: Any = option(
        (),
        env="FERRITE_POST_GRAD_CUSTOM_POST_PASS",
        changes_code=True,
        doc="The same, run after the post-grad rewrites.",
    )
    kernel_rewrites: bool = option(
        False,
        env="FERRITE_KERNEL_REWRITES",
        changes_code=True,
        doc="Rewrites to forms that want a kernel of their own. Off while those kernels are not compiled: in eager "
        "they are right, but no faster.",
    )
    cpu_grouped_gemm: bool = option(
        False,
        env="FERRITE_CPU_GROUPED_GEMM",
        changes_code=True,
        doc="Packed linear layers on one input become one grouped call (with max_autotune).",
    )
    cpu_concat_linear: bool = option(
        False,
        env="FERRITE_CPU_CONCAT_LINEAR",
        changes_code=True,
        doc="Linear layers with constant int4 weights on one input become one layer.",
    )
    post_grad_fusions: tuple[str, ...] = option(
        (),
        env="FERRITE_POST_GRAD_FUSIONS",
        changes_code=True,
        doc="Names of optional groups of rewrites to run, in this order (in the environment: separated by commas).",
    )
    dump_dir: Path | None = option(
        None,
        env="FERRITE_DUMP",
        changes_code=False,
        doc="Write every graph before and after each pass that changed it here, as Python that runs by itself.",
    )
    cache_dir: Path | None = option(
        None,
        env="FERRITE_CACHE_DIR",
        changes_code=False,
        doc="Where ferrite keeps files. Default: `ferrite` in the user's cache folder (`XDG_CACHE_HOME`, or `.cache` "
        "in the home folder).",
    )
    repro_dir: Path | None = option(
        None,
        env="FERRITE_REPRO_DIR",
        changes_code=False,
        doc="Where a failing stage keeps its repro folder. Default: `repro` in the cache folder.",
    )
    keep_repro: bool = option(
        True,
        env="FERRITE_KEEP_REPRO",
        changes_code=False,
        doc="Keep a repro folder when a stage fails.",
    )
    fail_at: Stage | None = option(
        None,
        env="FERRITE_FAIL_AT",
        changes_code=False,
        doc="Pretend that this stage fails, to see what a failure looks like and to try code that handles one.",
    )

    def __post_init__(self) -> None:
        for name, field in FIELDS.items():
            object.__setattr__(self, name, checked(field, getattr(self, name)))

    def cache_folder(self) -> Path:
        if self.cache_dir is not None:
            return self.cache_dir
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        return Path(base) / "ferrite"

    def repro_folder(self) -> Path:
        return self.repro_dir if self.repro_dir is not None else self.cache_folder() / "repro"

    def code_key(self) -> tuple[tuple[str, Any], ...]:
        """The settings that can change generated code, for the cache key."""
        return tuple((name, getattr(self, name)) for name, field in FIELDS.items() if field.metadata["changes_code"])

    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults, as plain JSON values."""
        values = {name: getattr(self, name) for name in FIELDS}
        return {name: plain(value) for name, value in values.items() if value != FIELDS[name].default}


def plain(value: Any) -> Any:
    """A setting as JSON; a pass by the name under which it can be imported again."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    named = getattr(value, "function", value)
    return f"{named.__module__}:{getattr(named, '__qualname__', type(named).__qualname__)}"


FIELDS: Mapping[str, dataclasses.Field[Any]] = types.MappingProxyType(
    {field.name: field for field in dataclasses.fields(Options)}
)
TYPES: Mapping[str, Any] = types.MappingProxyType(typing.get_type_hints(Options))

# torch.compile(mode=...): named presets, with the names and meanings users know.
MODES: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
        "default": {},
        "reduce-overhead": {"cuda_graphs": True},
        "max-autotune": {"max_autotune": True, "cuda_graphs": True},
        "max-autotune-no-cudagraphs": {"max_autotune": True},
    }
)

_active: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "ferrite options", default=types.MappingProxyType({})
)


@contextlib.contextmanager
def using(**settings: Any) -> Iterator[None]:
    """Settings for whatever is compiled in this thread while the context is active.

    A function compiled outside and first called inside is compiled inside: that is when its graphs are known.
    """
    token = _active.set({**_active.get(), **check_all(settings)})
    try:
        yield
    finally:
        _active.reset(token)


def resolve(
    explicit: Mapping[str, Any] | None = None,
    mode: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Options:
    """The options in force, by the precedence at the head of this module. `explicit` may hold a `mode` too."""
    explicit = dict(explicit or {})
    mode = explicit.pop("mode", mode)
    settings = {
        **from_environment(os.environ if environ is None else environ),
        **_active.get(),
        **preset(mode),
        **check_all(explicit),
    }
    return Options(**settings)


def preset(mode: str | None) -> Mapping[str, Any]:
    if mode is None:
        return {}
    if not isinstance(mode, str) or mode not in MODES:
        raise UserError(
            f"unknown mode {mode!r}",
            {"did you mean": nearest(str(mode), MODES), "all modes": ", ".join(MODES)},
        )
    return MODES[mode]


def check_all(settings: Mapping[str, Any]) -> dict[str, Any]:
    for name in settings:
        if name not in FIELDS:
            raise UserError(
                f"unknown option {name!r}",
                {"did you mean": nearest(str(name), FIELDS), "all options": "python -m ferrite options"},
            )
    return {name: checked(FIELDS[name], value) for name, value in settings.items()}


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        name: parse(name, environ[field.metadata["env"]], f"environment variable {field.metadata['env']}")
        for name, field in FIELDS.items()
        if environ.get(field.metadata["env"], "") != ""
    }


def parse(name: str, text: str, where: str) -> Any:
    """A setting given as text: an environment variable or a command-line argument."""
    kind = without_none(TYPES[name])
    if kind is bool:
        words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False}
        words["off"] = False
        if text.lower() not in words:
            raise UserError(f"{where} is {text!r}", {"expected": "1 or 0, true or false, yes or no, on or off"})
        return words[text.lower()]
    if kind is int:
        if not text.lstrip("-").isdigit():
            raise UserError(f"{where} is {text!r}", {"expected": "a whole number"})
        return int(text)
    if kind is Any or TYPES[name] == tuple[Any, ...]:
        return tuple(imported(word.strip(), where) for word in text.split(","))
    if typing.get_origin(kind) is tuple:
        return tuple(word.strip() for word in text.split(",") if word.strip())
    return checked(FIELDS[name], text)


def imported(path: str, where: str) -> Any:
    """The object at `module:name`."""
    module, separator, name = path.partition(":")
    try:
        if not separator:
            raise ImportError("no colon")
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as problem:
        raise UserError(f"{where} names {path!r}", {"expected": "module:name", "because": str(problem)}) from None


def checked(field: dataclasses.Field[Any], value: Any) -> Any:
    """The value in the field's type; a UserError where it is of another."""
    expected = TYPES[field.name]
    kind = without_none(expected)
    if value is None and kind is not expected:
        return None
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if not isinstance(value, str) or value not in choices:
            raise UserError(
                f"option {field.name!r} is {value!r}",
                {"did you mean": nearest(str(value), choices), "expected": one_of(choices)},
            )
        return value
    if kind is Any:
        items = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        return tuple(imported(item, f"option {field.name!r}") if isinstance(item, str) else item for item in items)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"option {field.name!r} is {value!r}, a {type(value).__name__}", {"expected": "a list"})
        (member, _) = typing.get_args(kind)
        wrong = next((item for item in value if member is str and not isinstance(item, str)), None)
        if wrong is not None:
            raise UserError(f"option {field.name!r} holds {wrong!r}", {"expected": "a list of names"})
        if member is Any:
            return tuple(imported(item, f"option {field.name!r}") if isinstance(item, str) else item for item in value)
        return tuple(value)
    if kind is Path and isinstance(value, (str, os.PathLike)):
        return Path(value).expanduser()
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(
            f"option {field.name!r} is {value!r}, a {type(value).__name__}",
            {"expected": type_name(field.name)},
        )
    return value


def without_none(expected: Any) -> Any:
    """`X` for the type `X | None`."""
    members = [member for member in typing.get_args(expected) if member is not type(None)]
    is_union = typing.get_origin(expected) in (typing.Union, types.UnionType)
    return members[0] if is_union else expected


def type_name(name: str) -> str:
    """The type of an option as a person would write it."""
    expected = TYPES[name]
    kind = without_none(expected)
    origin = typing.get_origin(kind)
    if kind is Any:
        return "a callable, a list of them, or None"
    if origin is tuple:
        return "list of names" if typing.get_args(kind)[0] is str else "list of passes"
    text = one_of(typing.get_args(kind)) if origin is Literal else kind.__name__.lower()
    return f"{text}, or None" if kind is not expected else text


def one_of(choices: tuple[str, ...]) -> str:
    return " | ".join(choices)
