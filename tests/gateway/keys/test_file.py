"""The keys file: who may read and write it, what it has to hold, and changes to it."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from services.config import Right
from services.gateway.keys.changes import add_key, revoke_key
from services.gateway.keys.file import KeysFileError, read_keys, what_is_wrong
from services.gateway.keys.key_entry import RateLimits
from tests.gateway.keys.key_files import KeySet, write_keys

NO_LIMITS = RateLimits()
LIMITS = RateLimits(requests_per_minute=60, tokens_per_minute=1000, max_concurrent=4)


def found(mode: int, owner: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))


def test_a_new_file_is_its_user_s_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "acme", [Right.API], 3, LIMITS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (entry,) = read_keys(path).entries
    assert (entry.tenant, entry.rights, entry.priority) == ("acme", frozenset({Right.API}), 3)
    assert entry.limits == LIMITS
    assert os.listdir(tmp_path) == ["keys.json"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o606])
def test_a_file_that_others_may_read_or_change_is_refused_in_words(tmp_path: Path, mode: int) -> None:
    path = write_keys(tmp_path / "keys.json").path
    path.chmod(mode)
    with pytest.raises(KeysFileError, match=r"other users may (read|change) it: run chmod 600"):
        read_keys(path)
    with pytest.raises(KeysFileError, match="other users"):
        add_key(path, "acme", [Right.API], 0, NO_LIMITS)


def test_a_secret_that_kubernetes_mounts_may_be_read_by_all_of_the_pod() -> None:
    me = os.geteuid()
    assert what_is_wrong(found(0o644, 0), mounted_secret=True) is None
    assert what_is_wrong(found(0o440, 0), mounted_secret=True) is None
    assert what_is_wrong(found(0o400, 0), mounted_secret=False) is None
    assert "may read" in (what_is_wrong(found(0o644, 0), mounted_secret=False) or "")
    assert "may change" in (what_is_wrong(found(0o666, 0), mounted_secret=True) or "")
    assert "another user" in (what_is_wrong(found(0o600, me + 1), mounted_secret=False) or "")
    if me != 0:
        assert "may read" in (what_is_wrong(found(0o644, me), mounted_secret=True) or "")


def test_a_mounted_secret_is_known_by_kubelet_s_links(tmp_path: Path) -> None:
    """As kubelet lays them out: keys.json -> ..data/keys.json, ..data -> ..2026_11_25."""
    version = tmp_path / "..2026_11_25"
    version.mkdir()
    path = write_keys(version / "keys.json").path
    (tmp_path / "..data").symlink_to(version.name)
    (tmp_path / "keys.json").symlink_to("..data/keys.json")
    (tmp_path / "link.json").symlink_to(path)
    path.chmod(0o644)
    with pytest.raises(KeysFileError, match="may read it"):
        read_keys(tmp_path / "link.json")
    if os.geteuid() == 0:
        assert len(read_keys(tmp_path / "keys.json").entries) == 4


def test_a_change_through_a_link_leaves_the_link(key_set: KeySet, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real = write_keys(tmp_path / "real" / "keys.json").path
    (tmp_path / "link.json").symlink_to(real)
    add_key(tmp_path / "link.json", "acme", [Right.API], 0, NO_LIMITS)
    assert (tmp_path / "link.json").is_symlink()
    assert len(read_keys(real).entries) == 5


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysFileError, match="cannot be read: No such file"):
        read_keys(tmp_path / "none")
    with pytest.raises(KeysFileError, match="cannot be read"):
        read_keys(tmp_path)
    with pytest.raises(KeysFileError, match="cannot be changed: No such file"):
        add_key(tmp_path / "nowhere" / "keys.json", "acme", [Right.API], 0, NO_LIMITS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content.update(version=2), "version"),
        (lambda content: content.update(secret="short"), "secret"),
        (lambda content: content.update(more=1), "more: Extra inputs are not permitted"),
        (lambda content: content["keys"][1].update(id=content["keys"][0]["id"]), "keys: two keys have one id"),
        (lambda content: content["keys"][1].update(hmac_sha256="00"), r"keys\[1\]\.hmac_sha256"),
        (lambda content: content["keys"][2].update(rights=["root"]), r"keys\[2\]\.rights"),
        (lambda content: content["keys"][2].update(rights=[]), r"keys\[2\]\.rights"),
        (lambda content: content["keys"][0].update(tenant="a b"), r"keys\[0\]\.tenant: a tenant has"),
        # In Redis the response b:id of tenant a would be the response id of tenant a:b.
        (lambda content: content["keys"][0].update(tenant="a:b"), r"keys\[0\]\.tenant: a tenant has"),
        (lambda content: content["keys"][0]["limits"].update(per_second=1), r"keys\[0\]\.limits\.per_second"),
        (lambda content: content["keys"][0]["limits"].update(max_concurrent=0), r"keys\[0\]\.limits\.max_concurrent"),
    ],
)
def test_a_wrong_file_is_refused_by_its_place_and_nothing_secret_is_said(tmp_path: Path, change, words: str) -> None:
    key_set = write_keys(tmp_path / "keys.json")
    content = json.loads(key_set.path.read_text())
    change(content)
    key_set.path.write_text(json.dumps(content))
    with pytest.raises(KeysFileError, match=words) as refused:
        read_keys(key_set.path)
    assert content["secret"] not in str(refused.value)
    assert str(refused.value).count("\n") == 0


def test_a_broken_file_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.json").path
    path.write_text(broken := path.read_text()[:200])
    with pytest.raises(KeysFileError, match="Invalid JSON"):
        add_key(path, "acme", [Right.API], 0, NO_LIMITS)
    assert path.read_text() == broken


def test_a_revoked_key_is_gone_and_an_unknown_one_is_said(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys.json").path
    id, _ = add_key(path, "acme", [Right.API], 0, NO_LIMITS)
    revoke_key(path, id)
    assert id not in path.read_text()
    assert len(read_keys(path).entries) == 4
    with pytest.raises(KeysFileError, match=f"has no key {id}"):
        revoke_key(path, id)


def test_no_key_is_lost_where_several_add_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def add() -> None:
        for _ in range(10):
            add_key(path, "acme", [Right.API], 0, NO_LIMITS)

    adding = [threading.Thread(target=add) for _ in range(4)]
    for thread in adding:
        thread.start()
    while any(thread.is_alive() for thread in adding):
        if path.exists():
            read_keys(path)  # whole at every moment
    assert len(read_keys(path).entries) == 40
