"""Options: types, precedence, modes, messages, and the generated reference page."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch

import ferrite
from ferrite.cli.options import reference_page
from ferrite.options import FIELDS, MODES, Options, resolve, using

pytestmark = pytest.mark.quick
DOCS = Path(__file__).parents[2] / "docs"


def test_every_option_is_documented_and_has_a_unique_environment_variable():
    variables = [field.metadata["env"] for field in FIELDS.values()]
    assert len(set(variables)) == len(variables)
    for name, field in FIELDS.items():
        assert field.metadata["env"].startswith("FERRITE_"), name
        assert field.metadata["doc"].endswith("."), name
        assert isinstance(field.metadata["changes_code"], bool), name


def test_options_are_frozen_and_hashable():
    options = Options(strict=True)
    assert hash(options) == hash(Options(strict=True))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.strict = False  # type: ignore[misc]


def test_precedence_explicit_mode_context_environment_default():
    environ = {"FERRITE_MAX_AUTOTUNE": "0", "FERRITE_CUDA_GRAPHS": "1", "FERRITE_STRICT": "1"}
    assert resolve(environ={}) == Options()
    assert resolve(environ=environ) == Options(cuda_graphs=True, strict=True)
    with using(cuda_graphs=False, max_autotune=False):
        assert resolve(environ=environ) == Options(strict=True)
        assert resolve(mode="max-autotune", environ=environ) == Options(
            max_autotune=True, cuda_graphs=True, strict=True
        )
        assert resolve({"cuda_graphs": False}, mode="max-autotune", environ=environ) == Options(
            max_autotune=True, strict=True
        )
    assert resolve(environ=environ) == Options(cuda_graphs=True, strict=True)


def test_contexts_nest_and_are_undone_by_exceptions():
    with using(strict=True):
        with pytest.raises(KeyError), using(decompose="core"):
            assert resolve(environ={}) == Options(strict=True, decompose="core")
            raise KeyError
        assert resolve(environ={}) == Options(strict=True)
    assert resolve(environ={}) == Options()


def test_a_context_belongs_to_its_thread():
    seen = []
    with using(strict=True):
        thread = threading.Thread(target=lambda: seen.append(resolve(environ={})))
        thread.start()
        thread.join()
    assert seen == [Options()]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("YES", True), ("on", True), ("0", False), ("false", False), ("off", False)],
)
def test_environment_truth_values(text, value):
    assert resolve(environ={"FERRITE_STRICT": text}).strict is value


def test_an_empty_environment_variable_counts_as_unset():
    assert resolve(environ={"FERRITE_STRICT": "", "FERRITE_CACHE_DIR": ""}) == Options()


def test_paths_are_expanded():
    assert resolve(environ={"FERRITE_CACHE_DIR": "~/x"}).cache_folder() == Path.home() / "x"
    assert Options(cache_dir=Path("a")).repro_folder() == Path("a/repro")
    assert Options(cache_dir=Path("a"), repro_dir=Path("b")).repro_folder() == Path("b")


def test_only_options_that_change_code_are_in_the_cache_key():
    assert Options(strict=True, cache_dir=Path("x")).code_key() == Options().code_key()
    assert Options(decompose="core").code_key() != Options().code_key()


MESSAGES = [
    (
        {"strcit": True},
        "unknown option 'strcit'\n  did you mean    strict\n  all options     python -m ferrite options",
    ),
    ({"strict": "yes"}, "option 'strict' is 'yes', a str\n  expected        bool"),
    ({"strict": 1}, "option 'strict' is 1, a int\n  expected        bool"),
    ({"decompose": "cor"}, "option 'decompose' is 'cor'\n  did you mean    core\n  expected        spelling | core"),
    ({"cache_dir": 3}, "option 'cache_dir' is 3, a int\n  expected        path, or None"),
    ({"mode": "max-autotun"}, "unknown mode 'max-autotun'\n  did you mean    max-autotune\n  all modes       "),
]


@pytest.mark.parametrize(("settings", "message"), MESSAGES)
def test_bad_options_say_what_was_meant(settings, message):
    with pytest.raises(ferrite.UserError) as caught:
        resolve(settings, environ={})
    assert str(caught.value).startswith(message)


def test_a_bad_environment_variable_is_named():
    with pytest.raises(ferrite.UserError, match="environment variable FERRITE_STRICT is 'maybe'"):
        resolve(environ={"FERRITE_STRICT": "maybe"})
    with pytest.raises(ferrite.UserError, match="option 'decompose' is 'cor'"):
        resolve(environ={"FERRITE_DECOMPOSE": "cor"})


@pytest.mark.parametrize(("settings", "message"), MESSAGES)
def test_torch_compile_raises_the_same_user_error(settings, message):
    compiled = torch.compile(lambda x: x + 1, backend="ferrite", options=settings)
    with pytest.raises(ferrite.UserError) as caught:
        compiled(torch.ones(2))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("settings", "message"), MESSAGES)
def test_ferrite_compile_reports_before_the_first_call(settings, message):
    with pytest.raises(ferrite.UserError) as caught:
        ferrite.compile(lambda x: x + 1, **settings)
    assert str(caught.value).startswith(message)


def options_used(compiled) -> Options:
    compiled(torch.ones(2))
    return ferrite.last_compile().options


@pytest.mark.parametrize("mode", list(MODES))
def test_torch_compile_modes_are_presets(mode, monkeypatch):
    monkeypatch.delenv("FERRITE_CACHE_DIR")
    assert options_used(torch.compile(lambda x: x + 1, backend="ferrite", mode=mode)) == Options(**MODES[mode])


def test_options_reach_the_compiler_from_every_door(monkeypatch):
    monkeypatch.delenv("FERRITE_CACHE_DIR")
    expected = Options(decompose="core")
    assert options_used(torch.compile(lambda x: x + 1, backend="ferrite", options={"decompose": "core"})) == expected
    assert options_used(ferrite.compile(lambda x: x + 2, decompose="core")) == expected
    assert options_used(ferrite.compile(decompose="core")(lambda x: x + 3)) == expected
    assert options_used(ferrite.compile(lambda x: x + 4, mode="max-autotune", decompose="core")) == Options(
        decompose="core", max_autotune=True, cuda_graphs=True
    )
    with ferrite.using(decompose="core"):
        assert options_used(ferrite.compile(lambda x: x + 5)) == expected
    monkeypatch.setenv("FERRITE_DECOMPOSE", "core")
    assert options_used(ferrite.compile(lambda x: x + 6)) == expected


def test_the_reference_page_is_current():
    assert (DOCS / "options.md").read_text() == reference_page(), "run `make docs`"
