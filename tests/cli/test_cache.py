"""`python -m ferrite cache`: what it prints, what it asks, and how it exits."""

from __future__ import annotations

import io
import os
import re

import pytest

from ferrite.__main__ import main
from ferrite.cache import EntryStore, Key, open_store
from ferrite.options import resolve

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("artifact_cache")]


@pytest.fixture(autouse=True)
def wide(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def store() -> EntryStore:
    """Three entries in the folder that the options name."""
    found = open_store(resolve())
    for number, (kind, torch) in enumerate((("graph", "2.12 abc"), ("graph", "2.13 abc"), ("kernel", "2.13 abc"))):
        key = Key.of(kind, {"torch": torch, "direction": "forward", "input 0": "float32 [8]", "operators": "aten.mm"})
        found.publish(key, {"code": bytes(2000)}, {})
        os.utime(found.path(key), (1000 + number, 1000 + number))
    return found


def digests(store: EntryStore) -> list[str]:
    """Oldest first."""
    return [entry.digest for entry in sorted(store.entries(), key=lambda entry: entry.used)]


def run(*arguments: str) -> int:
    return main(["cache", *arguments])


@pytest.mark.parametrize("command", [[], ["ls"], ["explain"], ["verify"], ["clear"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as done:
        run(*command, "--help")
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m ferrite cache")


def test_ls_lists_what_was_used_last_first(store, capsys):
    assert run("ls") == 0
    text = capsys.readouterr().out
    shown = re.findall(r"^[0-9a-f]{12}", text, re.MULTILINE)
    assert shown == [digest[:12] for digest in reversed(digests(store))]
    assert "forward, 1 inputs, torch 2.12" in text
    assert f"3 entries, {sum(entry.size for entry in store.entries()) / 1024:.1f} KiB of at most 2.0 GiB" in text


def test_ls_can_be_limited(store, capsys):
    assert run("ls", "--kind", "kernel") == 0
    assert "1 entries" in capsys.readouterr().out
    assert run("ls", "-n", "1") == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^[0-9a-f]{12}", text, re.MULTILINE)) == 1
    assert "2 more not shown" in text


def test_an_empty_cache(tmp_path, capsys):
    for command in ("ls", "explain", "verify", "clear"):
        assert run(command, "--dir", str(tmp_path / "none")) == 0
    text = capsys.readouterr().out
    for line in ("0 entries", "no graph is kept", "0 of 0 entries are whole", "nothing to remove"):
        assert line in text
    assert not (tmp_path / "none").exists()


def test_a_folder_whose_name_is_no_text(tmp_path, capsys):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    assert run("ls", "--dir", str(folder)) == 0
    assert r"caf\udce9" in capsys.readouterr().out


def test_explain_compares_and_shows(store, capsys):
    older, newer, kernel = digests(store)
    assert run("explain") == 0
    text = capsys.readouterr().out
    assert f"graph {newer[:12]} and graph {older[:12]}" in text
    assert re.search(r"torch +2\.12 abc +2\.13 abc", text)
    assert "float32" not in text  # both have it
    assert run("explain", older[:12]) == 0
    assert re.search(r"input 0 +float32 \[8\]", capsys.readouterr().out)
    assert run("explain", newer, kernel[:20]) == 0
    assert "do not differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "zz"], "UserError: no entry begins with 'zz'"),
        (["explain", ""], "UserError: no entry begins with ''"),
        (["explain", "a", "b", "c"], "UserError: explain takes two entries at most"),
    ],
)
def test_bad_input_is_explained(store, arguments, message, capsys):
    assert run(*arguments) == 2
    assert capsys.readouterr().err.startswith(message)


def test_verify_finds_and_removes_damage(store, capsys):
    victim = next(store.entries("kernel"))
    data = bytearray(victim.path.read_bytes())
    data[-5] ^= 1
    victim.path.write_bytes(data)
    assert run("ls") == 0
    assert run("verify") == 1
    text = capsys.readouterr().out
    assert "its contents are not what was written" in text
    assert "2 of 3 entries are whole" in text
    assert victim.path.exists()
    assert run("verify", "--remove") == 0
    assert not victim.path.exists()
    assert run("verify") == 0
    assert "2 of 2 entries are whole" in capsys.readouterr().out


def test_a_damaged_entry_is_shown_as_such(store, capsys):
    victim = next(store.entries("kernel"))
    victim.path.write_bytes(b"")
    assert run("ls") == 0
    assert "damaged" in capsys.readouterr().out
    assert run("explain", victim.digest) == 2
    assert "verify --remove" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_clear_asks(store, monkeypatch, capsys):
    assert run("clear") == 2  # nobody to ask
    assert "cache clear --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert run("clear") == 1
    assert "nothing was removed" in capsys.readouterr().out
    assert len(digests(store)) == 3
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert run("clear", "--kind", "graph") == 0
    assert [entry.kind for entry in store.entries()] == ["kernel"]
    assert run("clear", "--yes") == 0
    assert digests(store) == []


def test_clear_can_spare_what_was_used_lately(store, capsys):
    oldest, *others = digests(store)
    for entry in store.entries():
        if entry.digest != oldest:
            os.utime(entry.path)
    assert run("clear", "--unused-days", "3", "--yes") == 0
    assert "removed 1 of 1 entries" in capsys.readouterr().out
    assert set(digests(store)) == set(others)


def test_a_folder_that_others_can_write_is_named(store, capsys):
    store.folder.chmod(0o777)
    assert run("ls") == 2
    assert "can be written by others" in capsys.readouterr().err
