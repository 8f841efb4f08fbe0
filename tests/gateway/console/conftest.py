"""Consoles that are told of changes sooner than a person would see them."""

from pathlib import Path

import pytest

from services.gateway.console import feed
from tests.gateway.keys.key_files import KeySet, write_keys


@pytest.fixture
def key_set(tmp_path: Path) -> KeySet:
    return write_keys(tmp_path / "keys.json")


@pytest.fixture(autouse=True)
def quick_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the feed take its turns and samples twenty times as often."""
    monkeypatch.setattr(feed, "TURN_S", 0.05)
    monkeypatch.setattr(feed, "STEP_S", 0.25)
