"""Whom a folder belongs to, and who can write to it: what others could have put there is not used."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import ferrite
from ferrite.cache import EntryStore, Key, open_store
from ferrite.cache import folder as folders
from ferrite.cache.folder import Unusable, check_above, full_path, make_folders, make_shared, write_folder
from ferrite.debug.dump import Dump, DumpFolder
from ferrite.errors import FerriteWarning, is_ours, user_frame, warn_user
from ferrite.options import Options
from ferrite.runtime import host_code

KEY = Key.of("graph", {"torch": "2.13"})
OPEN, STICKY = 0o777, 0o1777

pytestmark = pytest.mark.quick


def is_used(options: Options) -> bool:
    """Whether something that is kept is found again; where not, one warning says so."""
    store = open_store(options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FerriteWarning)
        store.publish(KEY, {}, {"n": 1})
        found = store.fetch(KEY)
        store.publish(KEY, {}, {"n": 1})
    assert len(caught) == (0 if found else 1)
    assert (store.problem is None) == (found is not None)
    return found is not None


def make(path: Path, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)
    return path


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "used"), [(0o700, True), (0o755, True), (OPEN, False), (0o775, False), (STICKY, False)]
)
def test_the_folder_that_the_option_names_is_the_users_alone(tmp_path, mode, used):
    assert is_used(Options(cache_dir=make(tmp_path / "root", mode))) == used


@pytest.mark.parametrize(("mode", "used"), [(0o755, True), (STICKY, True), (OPEN, False)])
def test_folders_above_keep_users_apart(tmp_path, mode, used):
    """Where everybody may rename, somebody could put a folder of his in the place of ours."""
    above = make(tmp_path / "above", mode)
    assert is_used(Options(cache_dir=above / "some" / "root")) == used


def test_what_became_open_is_no_longer_used(tmp_path):
    options = Options(cache_dir=tmp_path / "root")
    assert is_used(options)
    (tmp_path / "root").chmod(OPEN)
    store = EntryStore(tmp_path / "root" / "artifacts", 1 << 20, tmp_path / "root")
    with pytest.warns(FerriteWarning, match="chmod 700"):
        assert store.fetch(KEY) is None
    assert "can be written by others" in store.examine()
    assert "can be written by others" in EntryStore(store.folder, 1 << 20, store.root).examine()


def test_a_link_that_the_option_names_is_not_followed(tmp_path):
    make(tmp_path / "elsewhere", 0o700)
    (tmp_path / "root").symlink_to(tmp_path / "elsewhere")
    assert not is_used(Options(cache_dir=tmp_path / "root"))


def test_own_links_above_are_followed(tmp_path):
    make(tmp_path / "elsewhere", 0o700)
    (tmp_path / "home").symlink_to("elsewhere")
    assert is_used(Options(cache_dir=tmp_path / "home" / "root"))
    assert (tmp_path / "elsewhere" / "root" / "artifacts").is_dir()
    make(tmp_path / "open", OPEN)
    (tmp_path / "shown").symlink_to(tmp_path / "open")
    with pytest.raises(Unusable, match="can be written by everybody"):
        check_above(tmp_path / "shown" / "root")


def test_links_of_others_above_are_not_followed(tmp_path, monkeypatch):
    make(tmp_path / "elsewhere", 0o700)
    (tmp_path / "planted").symlink_to(tmp_path / "elsewhere")
    check_above(tmp_path / "planted" / "root")
    monkeypatch.setattr(folders, "ROOT", -1)
    monkeypatch.setattr(folders, "own_user", lambda: os.geteuid() + 1)
    with pytest.raises(Unusable, match="is a link of another user"):
        check_above(tmp_path / "planted" / "root")


def test_links_in_a_circle_end(tmp_path):
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    with pytest.raises(OSError, match="circle"):
        check_above(tmp_path / "one" / "root")


def test_all_that_is_made_is_private_whatever_the_mask(tmp_path):
    mask = os.umask(0)
    try:
        assert is_used(Options(cache_dir=tmp_path / "a" / "b" / "root"))
    finally:
        os.umask(mask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*") if path.is_dir()}
    assert modes == {"b": 0o755, "root": 0o700, "artifacts": 0o700, "graph": 0o700}


@pytest.mark.parametrize("name", [".", "x/../y", os.fsdecode(b"caf\xe9"), "a\nb", "größe"])
def test_names_of_any_kind(tmp_path, monkeypatch, name):
    monkeypatch.chdir(make(tmp_path / "here", 0o700))
    os.mkdir("x")
    assert is_used(Options(cache_dir=name, cache_size=len(name) + 10))


def test_a_folder_to_work_in_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(make(tmp_path / "here", 0o700))
    os.rmdir(tmp_path / "here")
    with pytest.warns(FerriteWarning, match="works in is gone"):
        store = open_store(Options(cache_dir="relative-to-nothing"))
    assert store.fetch(KEY) is None


def test_a_relative_folder_in_the_environment_is_ignored(monkeypatch):
    """As its standard asks."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert Options().cache_folder() == Path.home() / ".cache" / "ferrite"
    monkeypatch.setenv("XDG_CACHE_HOME", "/absolute")
    assert Options().cache_folder() == Path("/absolute/ferrite")


def test_without_a_home_nothing_is_made_here(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("FERRITE_CACHE_DIR")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(FerriteWarning) as caught:
        torch.compile(torch.sin, backend="ferrite", options={"fail_at": "lower"})(torch.ones(3))
    assert any("there is no home folder" in str(each.message) for each in caught)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Unusable):
        full_path(Path("~/x"))


# --- folders of repros and dumps --------------------------------------------------------------------------------------


def test_a_shared_folder_keeps_users_apart(tmp_path, monkeypatch):
    for name, mode in (("own", 0o755), ("sticky", STICKY)):
        make_shared(make(tmp_path / name, mode))
    make_shared(tmp_path / "new" / "one")
    assert stat.S_IMODE((tmp_path / "new" / "one").stat().st_mode) == 0o700
    with pytest.raises(Unusable, match="can be written by others"):
        make_shared(make(tmp_path / "open", OPEN))
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(Unusable, match="is not a folder"):
        make_shared(tmp_path / "link")
    monkeypatch.setattr(folders, "own_user", lambda: os.geteuid() + 1)
    monkeypatch.setattr(folders, "ROOT", -1)
    with pytest.raises(Unusable, match="belongs to another user"):
        make_shared(tmp_path / "own")


def test_a_folder_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            write_folder(tmp_path / "repro", {"run.py": b"1"})
    assert list(tmp_path.iterdir()) == []
    write_folder(tmp_path / "repro", {"run.py": b"1"})
    write_folder(tmp_path / "repro", {"run.py": b"2"})  # as by another process meanwhile
    assert (tmp_path / "repro" / "run.py").read_bytes() == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["repro"]


def test_a_link_in_the_place_of_a_folder_or_file_is_not_followed(tmp_path):
    victim = make(tmp_path / "victim", 0o700)
    (tmp_path / "repro").symlink_to(victim)
    with pytest.raises(OSError, match=r"Not a directory|is not a folder"):
        write_folder(tmp_path / "repro", {"run.py": b"1"})
    assert list(victim.iterdir()) == []
    (tmp_path / "precious").write_text("mine")
    dump = Dump(DumpFolder(tmp_path / "dump"), "check")
    make_folders([tmp_path / "dump", tmp_path / "dump" / dump.name])
    (tmp_path / "dump" / dump.name / "host.py").symlink_to(tmp_path / "precious")
    dump.write("host.py", "text")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "dump" / dump.name / "host.py").read_text() == "text"
    (tmp_path / "dumps").symlink_to(victim)
    with pytest.warns(FerriteWarning, match="could not write"):
        Dump(DumpFolder(tmp_path / "dumps"), "check").write("host.py", "text")
    assert list(victim.iterdir()) == []


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_a_warning_names_the_line_of_the_user(tmp_path):
    blocked = make(tmp_path / "open", OPEN)
    options = {"cache": True, "cache_dir": str(blocked), "strict": True}
    function = torch.compile(lambda x: x.sin() + 1, backend="ferrite", options=options)
    with pytest.warns(FerriteWarning, match="the cache cannot be used") as caught:
        function(torch.ones(3))
    (warning,) = caught
    assert warning.filename == __file__
    assert "function(torch.ones(3))" in Path(__file__).read_text().splitlines()[warning.lineno - 1]


def test_frames_of_torch_python_and_made_code_are_not_the_users():
    assert is_ours(torch.__file__)
    assert is_ours(ferrite.__file__)
    assert is_ours(threading.__file__)
    assert is_ours("<frozen runpy>")
    assert not is_ours(__file__)
    assert not is_ours(pytest.__file__)
    assert not is_ours("<stdin>")
    assert user_frame(None) is None


def test_a_thread_without_lines_of_the_user_can_warn():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=warn_user, args=("from nowhere",))
        thread.start()
        thread.join()
    assert [(str(each.message), each.filename) for each in caught] == [("from nowhere", "ferrite")]


def test_all_warnings_go_through_one_function():
    package = Path(ferrite.__file__).parent
    wrong = [str(path) for path in package.rglob("*.py") if "warnings.warn(" in path.read_text()]
    assert wrong == []


# --- threads ----------------------------------------------------------------------------------------------------------


def test_where_no_thread_can_be_had_kernels_are_compiled_in_ones_own(monkeypatch):
    """As at the end of a process: the main thread is gone, and no work is taken any more."""

    def refuse(*_args):
        refused.append(1)
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    refused: list[int] = []
    monkeypatch.setattr(host_code.KNOWN, "code", {})
    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    x = torch.rand(5, 5)
    ours = torch.compile(lambda x: (x.sin() @ x).cos(), backend="ferrite", options={"strict": True})(x)
    torch.testing.assert_close(ours, (x.sin() @ x).cos())
    assert len(refused) >= 2


@pytest.mark.slow
def test_a_thread_compiles_when_the_main_thread_has_ended():
    code = """
import threading, warnings, torch, ferrite
warnings.simplefilter("error", ferrite.FerriteWarning)

def late():
    threading.main_thread().join()
    def function(x):
        return (x.sin() @ x).cos().sum(0), torch.softmax(x * 3, -1)
    x = torch.rand(6, 6, requires_grad=True)
    one, other = torch.compile(function, backend="ferrite", options={"strict": True})(x)
    torch.testing.assert_close(one, function(x)[0])
    (one.sum() + other.square().sum()).backward()
    print([graph.failure for graph in ferrite.last_compile().graphs])

threading.Thread(target=late).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert (done.stdout.strip(), done.stderr) == ("[None, None]", "")
