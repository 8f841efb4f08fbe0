"""Authorities for the whole run, and the certificates of one test."""

import pytest

from services.launcher.authority import Authority
from tests.certificates import Certificates


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="session")
def other_authority() -> Authority:
    return Authority("another")


@pytest.fixture
def certificates(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(authority, tmp_path_factory.mktemp("certificates"))
