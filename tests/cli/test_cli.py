"""`python -m ferrite`: every command, its help, and what it says to bad input."""

from __future__ import annotations

import re

import pytest
import torch

import ferrite
from ferrite.__main__ import main
from ferrite.cli import doctor
from ferrite.cli.specs import parse_argument
from ferrite.options import Options

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x):
        return torch.relu(self.linear(x))

def double(x):
    return x * 2

number = 3
"""


@pytest.fixture
def net(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "net.py")


@pytest.mark.quick
@pytest.mark.parametrize("command", [[], ["doctor"], ["demo"], ["compile"], ["tune"], ["options"]])
def test_help_everywhere(command, capsys):
    with pytest.raises(SystemExit) as done:
        main([*command, "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m ferrite")
    assert len(text.splitlines()) > 4


@pytest.mark.quick
def test_compile_prints_the_record(net, capsys):
    assert main(["compile", f"{net}:Net", "f32[2,4]", "--train", "--source"]) == 0
    text = capsys.readouterr().out
    assert "forward" in text
    assert "backward" in text
    assert "eager: matmul: a kernel of torch" in text
    assert "run_0(" in text
    assert "def forward(args):" in text
    assert "net.py:10" in text


@pytest.mark.quick
def test_compile_takes_modules_functions_options_and_modes(net, capsys):
    assert main(["compile", "net:double", "f32[3]", "--dynamic", "-o", "decompose=core", "--mode", "max-autotune"]) == 0
    options = ferrite.last_compile().options
    assert (options.decompose, options.max_autotune) == ("core", True)
    assert "s77" in ferrite.last_compile().graphs[0].source


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["net:Netz"], "UserError: net has no 'Netz'\n  did you mean    Net"),
        (["net:number"], "UserError: net:number is a int, not a function or module"),
        (["net"], "UserError: cannot read 'net'\n  expected        MODULE:CALLABLE"),
        (["nosuch:f"], "UserError: there is no module 'nosuch'"),
        (["nosuch.py:f"], "UserError: there is no file nosuch.py"),
        (["net:double", "f33[3]"], "UserError: unknown dtype 'f33' in 'f33[3]'\n  did you mean    f32"),
        (["net:double", "f32[3"], "UserError: cannot read the argument 'f32[3'"),
        (["net:double", "f32[3]", "-o", "strict"], "UserError: cannot read the option 'strict'"),
        (["net:double", "f32[3]", "-o", "strct=1"], "UserError: unknown option 'strct'\n  did you mean    strict"),
        (["net:double", "f32[3]", "-o", "strict=2"], "UserError: option strict is '2'"),
        (["net:double", "i64[3]", "--train"], "UserError: --train needs an output that requires grad"),
    ],
)
def test_bad_input_is_explained(net, arguments, message, capsys):
    assert main(["compile", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.quick
def test_specs_make_what_they_say():
    x = parse_argument("bf16[2, 3]", requires_grad=True)
    assert (x.dtype, x.shape, x.requires_grad) == (torch.bfloat16, (2, 3), True)
    y = parse_argument("i32[100]<7")
    assert y.dtype is torch.int32
    assert 0 <= y.min() <= y.max() < 7
    assert parse_argument("f64[]").shape == ()
    assert parse_argument("bool[4]").dtype is torch.bool
    assert parse_argument("(1, 2.5, None)") == (1, 2.5, None)


@pytest.mark.quick
def test_doctor_finds_this_environment_fit(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for item in ("torch", "LLVM", "CPU", "threads", "GPU", "Triton", "cache"):
        assert item in text
    assert "bad" not in text


@pytest.mark.quick
def test_doctor_says_what_to_do(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache = doctor.check_cache(Options(cache_dir=blocked))
    assert cache.verdict == "note"
    assert "FERRITE_CACHE_DIR" in cache.advice
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert doctor.check_cache(Options(cache_dir=open_to_all)).advice == f"chmod 700 {open_to_all}"
    monkeypatch.setattr("ferrite.capture.check_torch_version", lambda: "newer")
    assert doctor.check_torch().verdict == "note"


@pytest.mark.quick
def test_doctor_reports_an_old_torch_as_bad(monkeypatch, capsys):
    def refuse():
        raise ferrite.UserError("torch 2.0 is too old for ferrite", {"to change that": "pip install torch"})

    monkeypatch.setattr("ferrite.capture.check_torch_version", refuse)
    assert main(["doctor"]) == 1
    assert "too old" in capsys.readouterr().out


@pytest.mark.quick
def test_doctor_survives_a_check_that_breaks(monkeypatch):
    def check_broken():
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(doctor, "check_gpu", check_broken)
    broken = [finding for finding in doctor.examine() if finding.item == "broken"]
    assert [(finding.verdict, finding.found) for finding in broken] == [("bad", "ZeroDivisionError: oh")]


@pytest.mark.quick
def test_options_are_listed(capsys):
    assert main(["options"]) == 0
    assert "FERRITE_STRICT" in capsys.readouterr().out


def test_demo_trains_like_eager(capsys):
    assert main(["demo", "--steps", "3", "--no-inductor"]) == 0
    text = capsys.readouterr().out
    assert "ferrite trains like eager" in text
    assert re.search(r"^\d+ kernels compiled by ferrite, \d+ calls of torch's: \d+ matmul", text, re.M)
    assert "What to try next" in text
    assert len(text.splitlines()) <= 24, "it fits a screen"


@pytest.mark.quick
def test_compile_prints_the_new_records_of_a_long_process(net, capsys):
    """Only so many records are remembered: new ones are not those beyond a count."""
    from ferrite.debug.record import MAX_RECORDS, start_record

    for _ in range(MAX_RECORDS):
        start_record(Options(), None)
    assert main(["compile", f"{net}:Net", "f32[2,4]"]) == 0
    text = capsys.readouterr().out
    assert text.count("inference") + text.count("forward") == 1
