"""One keys file for the tests that only read it."""

from pathlib import Path

import pytest

from tests.gateway.keys.key_files import KeySet, write_keys


@pytest.fixture(scope="session")
def key_set(tmp_path_factory: pytest.TempPathFactory) -> KeySet:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    return write_keys(path)
