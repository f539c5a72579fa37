"""Options: types, precedence, modes, messages, and the generated reference page."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest
import torch

import ferrite
from ferrite.cli.options import reference_page
from ferrite.options import FIELDS, MODES, TYPES, Options, resolve, using
from ferrite.options.values import Choice

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("artifact_cache")]
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
        options.strict = False


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
    ({"cache_size": -1}, "option 'cache_size' is -1\n  expected        a whole number from 0 to 1099511627776"),
    ({"cache_size": 10**400}, "option 'cache_size' is a number of more than 100 digits"),
    ({"cache_size": 1.5}, "option 'cache_size' is 1.5, a float\n  expected        int"),
    ({"cache_size": True}, "option 'cache_size' is True, a bool\n  expected        int"),
    ({"fuel": -1}, "option 'fuel' is -1\n  expected        a whole number from 0"),
    ({"split_cat_min_run": 1}, "option 'split_cat_min_run' is 1\n  expected        a whole number from 2"),
    ({"rounds": {"split_cat_pass": 0}}, "option 'rounds' has 0 for 'split_cat_pass'\n  expected        a whole number"),
    ({"cache_dir": ""}, "option 'cache_dir' is ''\n  expected        the path of a folder"),
    ({"repro_dir": "a\0b"}, "option 'repro_dir' is 'a\\x00b'\n  expected        the path of a folder"),
    ({"dump_dir": "~nobody-of-that-name/x"}, "option 'dump_dir' is '~nobody-of-that-name/x'\n  because"),
    ({"mode": "max-autotun"}, "unknown mode 'max-autotun'\n  did you mean    max-autotune\n  all modes       "),
]


@pytest.mark.parametrize(("settings", "message"), MESSAGES)
def test_bad_options_say_what_was_meant(settings, message):
    with pytest.raises(ferrite.UserError) as caught:
        resolve(settings, environ={})
    assert str(caught.value).startswith(message)


def test_every_number_has_a_least():
    """So that the next option that is a size is not forgotten."""
    for name, field in FIELDS.items():
        if TYPES[name] in (int, int | None):
            assert field.metadata["least"] is not None, name


@pytest.mark.parametrize("text", ["--5", "-", "\u00b2", "many", "9" * 5000, "1e3", "0x10"])
def test_a_number_in_the_environment_that_is_none_is_named(text):
    with pytest.raises(ferrite.UserError, match="environment variable FERRITE_FUEL is"):
        resolve(environ={"FERRITE_FUEL": text})


def test_numbers_in_the_environment_have_a_range():
    assert resolve(environ={"FERRITE_CACHE_SIZE": "0"}).cache_size == 0
    with pytest.raises(ferrite.UserError, match="option 'cache_size' is -5"):
        resolve(environ={"FERRITE_CACHE_SIZE": "-5"})
    with pytest.raises(ferrite.UserError, match="FERRITE_ROUNDS has"):
        resolve(environ={"FERRITE_ROUNDS": "split_cat_pass:" + "9" * 5000})


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


# --- names with settings ----------------------------------------------------------------------------------------------


def test_fusions_keep_the_order_and_the_settings_they_are_given():
    given = {"decompose_mm_pass": {"cpu_max_rows": 4}, "batch_aten_tanh": {}}
    options = Options(post_grad_fusions=given)
    chosen = (Choice("decompose_mm_pass", (("cpu_max_rows", 4),)), Choice("batch_aten_tanh"))
    assert options.post_grad_fusions == chosen
    assert options == Options(post_grad_fusions=chosen)
    assert hash(options) == hash(Options(post_grad_fusions=given))
    other = Options(post_grad_fusions=dict(reversed(given.items())))
    assert other != options
    assert other.code_key() != options.code_key()
    assert Options(post_grad_fusions=["batch_aten_tanh"]) == Options(post_grad_fusions={"batch_aten_tanh": {}})


def test_fusions_are_frozen():
    given = {"batch_aten_tanh": {"depth": 3}}
    options = Options(post_grad_fusions=given)
    given["batch_aten_tanh"]["depth"] = 4
    (choice,) = options.post_grad_fusions
    assert choice == Choice("batch_aten_tanh", (("depth", 3),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        choice.name = "batch_aten_relu"


def test_fusions_as_text_and_as_json():
    text = "batch_aten_tanh:min_members=3:same_users=true, decompose_mm_pass,partitioned_scatter:mem_fraction=0.5"
    options = resolve(environ={"FERRITE_POST_GRAD_FUSIONS": text})
    expected = {
        "batch_aten_tanh": {"min_members": 3, "same_users": True},
        "decompose_mm_pass": {},
        "partitioned_scatter": {"mem_fraction": 0.5},
    }
    assert options.post_grad_fusions == Options(post_grad_fusions=expected).post_grad_fusions
    assert json.loads(json.dumps(options.changed())) == {"post_grad_fusions": expected}
    assert Options(**json.loads(json.dumps(options.changed()))) == options
    with pytest.raises(ferrite.UserError, match="FERRITE_POST_GRAD_FUSIONS has 'batch_aten_tanh:depth'"):
        resolve(environ={"FERRITE_POST_GRAD_FUSIONS": "batch_aten_tanh:depth"})


BAD_FUSIONS = [
    ("batch_aten_tanh", "option 'post_grad_fusions' is 'batch_aten_tanh', a str\n  expected        list of names, or"),
    ({"batch_aten_tanh": 3}, "option 'post_grad_fusions' has 3 for 'batch_aten_tanh'\n  expected        a mapping"),
    ({"batch_aten_tanh": {"depth": [3]}}, "option 'post_grad_fusions' has depth=[3] for 'batch_aten_tanh'\n  expected"),
    (
        ["batch_aten_tahn"],
        "option 'post_grad_fusions' has an unknown fusion 'batch_aten_tahn'\n  did you mean    batch_",
    ),
    ({"batch_aten_tanh": {"dept": 3}}, "the fusion 'batch_aten_tanh' has no setting 'dept'\n  did you mean    depth"),
    (
        {"select_cat_aten_pass": {"depth": 3}},
        "the fusion 'select_cat_aten_pass' has no setting 'depth'\n  all settings",
    ),
    ({"decompose_mm_pass": {"min_rows": True}}, "the setting 'min_rows' of the fusion 'decompose_mm_pass' is True"),
    ({"decompose_mm_pass": {"cpu_max_rows": -1}}, "the setting 'cpu_max_rows' of the fusion 'decompose_mm_pass' is -1"),
    (
        {"partitioned_scatter": {"mem_fraction": "x"}},
        "the setting 'mem_fraction' of the fusion 'partitioned_scatter' is",
    ),
]


@pytest.mark.parametrize(("given", "message"), BAD_FUSIONS)
def test_bad_fusions_are_reported_at_once(given, message):
    with pytest.raises(ferrite.UserError) as caught:
        ferrite.compile(lambda x: x + 1, post_grad_fusions=given)
    assert str(caught.value).startswith(message)


def test_names_of_other_stages_are_accepted_with_whatever_they_take():
    compiled = ferrite.compile(lambda x: x + 1, post_grad_fusions={"pad_aten_mm_pass": {"k_threshold_to_pad": 8}})
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_settings_reach_the_rules():
    def product(a, b):
        return torch.mm(a, b) + 1

    inputs = [torch.rand(3, 6), torch.rand(6, 5)]
    for rows, fires in ((2, 0), (3, 1)):
        fusions = {"decompose_mm_pass": {"cpu_max_rows": rows}}
        torch.compiler.reset()
        compiled = torch.compile(product, backend="ferrite", options={"strict": True, "post_grad_fusions": fusions})
        torch.testing.assert_close(compiled(*inputs), product(*inputs))
        assert ferrite.last_compile().rewrites.get("decompose_mm", 0) == fires


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


@pytest.mark.parametrize(("given", "word"), [(True, "always"), (False, "off"), ("auto", "auto")])
def test_a_setting_of_words_takes_truth_values(given, word):
    assert resolve({"kernel_rewrites": given}, environ={}).kernel_rewrites == word
    assert resolve(environ={"FERRITE_KERNEL_REWRITES": str(given)}).kernel_rewrites == word


def test_truth_values_are_no_words_where_nothing_is_switched():
    with pytest.raises(ferrite.UserError, match="rng"):
        resolve({"rng": True}, environ={})
