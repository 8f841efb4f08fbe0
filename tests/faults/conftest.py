"""A model, and the case of one fault."""

from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path

import pytest

from tests.e2e.conftest import write_model
from tests.e2e.stack import Stack
from tests.faults.case import Case, case_of
from tests.faults.table import VERDICT


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def case(stack: Stack, record_property: Callable[[str, object], None]) -> Iterator[Case]:
    """What came of it goes into the table, also where the test fails."""
    with case_of(stack, lambda verdict: record_property(VERDICT, astuple(verdict))) as made:
        yield made
