"""A keys file that changes while a gateway runs."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.config import Right
from services.gateway.api.errors import ApiError
from services.gateway.keys.changes import add_key, revoke_key
from services.gateway.keys.file import KeysFileError
from services.gateway.keys.key_entry import RateLimits
from services.gateway.keys.reload import FollowedKeys
from tests.gateway.dispatch_stack import eventually
from tests.gateway.keys.key_files import write_keys


def is_known(followed: FollowedKeys, key: str) -> bool:
    try:
        followed.keys.caller(lambda name: f"Bearer {key}" if name == "authorization" else "", Right.API)
    except ApiError:
        return False
    return True


@asynccontextmanager
async def following(path: Path) -> AsyncIterator[FollowedKeys]:
    followed = FollowedKeys(path)
    task = asyncio.create_task(followed.follow(interval_s=0.01))
    try:
        yield followed
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_new_key_opens_and_a_revoked_one_no_longer(tmp_path: Path):
    key_set = write_keys(tmp_path / "keys.json")
    async with following(key_set.path) as followed:
        id, key = add_key(key_set.path, "new", [Right.API], 0, RateLimits())
        await eventually(lambda: is_known(followed, key))
        revoke_key(key_set.path, id)
        await eventually(lambda: not is_known(followed, key))
        assert is_known(followed, key_set.acme)


async def test_a_change_between_reading_and_following_is_found(tmp_path: Path):
    key_set = write_keys(tmp_path / "keys.json")
    followed = FollowedKeys(key_set.path)
    _, key = add_key(key_set.path, "new", [Right.API], 0, RateLimits())
    task = asyncio.create_task(followed.follow(interval_s=0.01))
    await eventually(lambda: is_known(followed, key))
    task.cancel()


@pytest.mark.parametrize("damage", ["broken", "gone", "open to others"])
async def test_a_file_that_cannot_be_used_keeps_the_old_keys_and_is_logged_once(tmp_path: Path, damage: str):
    key_set = write_keys(tmp_path / "keys.json")
    whole = key_set.path.read_text()
    with capture_logs() as logs:
        async with following(key_set.path) as followed:
            match damage:
                case "broken":
                    key_set.path.write_text(whole[:300])
                case "gone":
                    key_set.path.unlink()
                case "open to others":
                    key_set.path.chmod(0o644)
            await eventually(lambda: bool(logs))
            await asyncio.sleep(0.1)
            assert is_known(followed, key_set.acme)
            assert [(line["event"], line["log_level"]) for line in logs] == [
                ("the keys file cannot be used; the keys stay as they were", "error")
            ]
            assert not any(secret in str(logs) for secret in key_set.secrets)
            key_set.path.write_text(whole)
            key_set.path.chmod(0o600)
            await eventually(lambda: logs[-1]["event"] == "keys reloaded")


async def test_a_secret_that_kubelet_replaces_is_read_again(tmp_path: Path):
    """Kubelet renames the link ..data; the file's own path never changes."""
    old, new = tmp_path / "..old", tmp_path / "..new"
    old.mkdir()
    new.mkdir()
    write_keys(old / "keys.json")
    key_set = write_keys(new / "keys.json")
    (tmp_path / "..data").symlink_to("..old")
    (tmp_path / "keys.json").symlink_to("..data/keys.json")
    async with following(tmp_path / "keys.json") as followed:
        assert not is_known(followed, key_set.acme)
        (tmp_path / "..data_tmp").symlink_to("..new")
        os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
        await eventually(lambda: is_known(followed, key_set.acme))


def test_a_missing_file_is_refused_at_the_start(tmp_path: Path):
    with pytest.raises(KeysFileError):
        FollowedKeys(tmp_path / "none")
