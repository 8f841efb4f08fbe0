"""Machine code on disk is found again as it was kept, or not at all."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.engine.kernels.cpu import code_store
from services.engine.kernels.cpu.code_store import CodeDirectory, NoStore, the_code_store

KEY, CODE = "a_key", bytes(range(256)) * 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store's directory, with one entry."""
    path = tmp_path / "baton" / "kernels"
    CodeDirectory(path).keep(KEY, CODE)
    return path


def test_what_was_kept_is_found(path: Path) -> None:
    with capture_logs() as logs:
        assert CodeDirectory(path).find(KEY) == CODE
        assert CodeDirectory(path).find("another") is None
        assert CodeDirectory(path / "not there").find(KEY) is None
    assert logs == []


def test_no_one_else_may_write_what_is_kept(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / KEY).stat().st_mode & 0o777 == 0o600


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _entry: b"",
    "truncated": lambda entry: entry[:-1],
    "longer": lambda entry: entry + b"\0",
    "another byte": lambda entry: entry[:100] + bytes([entry[100] ^ 1]) + entry[101:],
    "another checksum": lambda entry: bytes([entry[0] ^ 1]) + entry[1:],
    "less than a checksum": lambda entry: entry[:20],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_not_used_but_replaced(path: Path, damage: str) -> None:
    (path / KEY).write_bytes(DAMAGES[damage]((path / KEY).read_bytes()))
    assert CodeDirectory(path).find(KEY) is None
    CodeDirectory(path).keep(KEY, CODE)
    assert CodeDirectory(path).find(KEY) == CODE


def test_an_entry_under_another_key_is_not_used(path: Path) -> None:
    (path / KEY).rename(path / "another")
    assert CodeDirectory(path).find("another") is None


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_an_entry_that_others_may_write_is_not_used_but_replaced(path: Path, mode: int) -> None:
    (path / KEY).chmod(mode)
    with capture_logs() as logs:
        assert CodeDirectory(path).find(KEY) is None
    assert len(logs) == 1
    CodeDirectory(path).keep(KEY, CODE)
    assert CodeDirectory(path).find(KEY) == CODE


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_directory_that_others_may_write_is_not_used(path: Path, mode: int) -> None:
    path.chmod(mode)
    assert_nothing_is_kept(path)


def test_a_directory_of_another_user_is_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert_nothing_is_kept(path)


def test_an_entry_of_another_user_is_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = iter([path.stat().st_uid, path.stat().st_uid + 1])  # as the directory is checked, and as the entry is
    monkeypatch.setattr(os, "geteuid", lambda: next(owner))
    assert CodeDirectory(path).find(KEY) is None


def test_links_are_not_followed(path: Path, tmp_path: Path) -> None:
    (path / KEY).rename(tmp_path / KEY)
    (path / KEY).symlink_to(tmp_path / KEY)
    assert CodeDirectory(path).find(KEY) is None
    (tmp_path / "link").symlink_to(path)
    assert_nothing_is_kept(tmp_path / "link")


def test_a_directory_that_cannot_be_made_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_nothing_is_kept(tmp_path / "file" / "kernels")


def test_an_entry_that_cannot_be_written_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk; a file system that is read-only ends in the same error."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "rename", refuse)
    with capture_logs() as logs:
        CodeDirectory(path).keep("another", CODE)
    assert len(logs) == 1
    assert os.listdir(path) == [KEY]


def assert_nothing_is_kept(path: Path) -> None:
    """Neither found nor written, which is logged once."""
    store, before = CodeDirectory(path), os.listdir(path) if path.is_dir() else None
    with capture_logs() as logs:
        for key in (KEY, "another", KEY):
            store.keep(key, CODE)
            assert store.find(key) is None
    assert [entry["event"] for entry in logs] == ["compiled kernels are not kept"]
    assert before == (os.listdir(path) if path.is_dir() else None)


def test_what_was_not_used_for_long_is_removed(path: Path) -> None:
    store, long_ago = CodeDirectory(path), time.time() - 31 * 24 * 3600
    (path / ".partial").touch()  # of a process that was ended while it wrote
    for name in (KEY, ".partial"):
        os.utime(path / name, (long_ago, long_ago))
    store.keep("another", CODE)
    assert os.listdir(path) == ["another"]


def test_what_was_read_lately_stays(path: Path) -> None:
    os.utime(path / KEY, (time.time(), time.time() - 31 * 24 * 3600))
    CodeDirectory(path).keep("another", CODE)
    assert sorted(os.listdir(path)) == [KEY, "another"]


def test_of_too_much_what_was_used_least_lately_is_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_store, "_MOST_BYTES", 4 * (len(CODE) + 32))
    store = CodeDirectory(path)
    for number, key in enumerate([KEY, "1", "2", "3", "4", "5"]):
        store.keep(key, CODE)
        os.utime(path / key, (time.time() - 100 + number,) * 2)
    store.keep("last", CODE)
    assert sorted(os.listdir(path)) == ["3", "4", "5", "last"]


@pytest.mark.parametrize("cache_home", ["/somewhere", "", "relative", None])
def test_it_lies_where_caches_lie(cache_home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at a path that is relative, as the XDG Base Directory Specification has it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache_home is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", cache_home)
    expected = Path("/somewhere") if cache_home == "/somewhere" else tmp_path / ".cache"
    store = the_code_store.__wrapped__()
    assert isinstance(store, CodeDirectory)
    assert store.path == expected / "baton" / "kernels"


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with capture_logs() as logs:
        store = the_code_store.__wrapped__()
    assert isinstance(store, NoStore)
    store.keep(KEY, CODE)
    assert store.find(KEY) is None
    assert len(logs) == 1
