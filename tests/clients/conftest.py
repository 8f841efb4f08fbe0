"""One stack for all clients, and the environments of those that have one of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import environments
from tests.e2e.conftest import write_model
from tests.e2e.stack import Stack, worker_ports
from tests.machine import miss


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One pair, through which every answer is handed off. The model's template knows no tools.

    Fields that nobody knows are refused: else a test could pass where what its client asks for is ignored.
    """
    model = write_model(tmp_path_factory.mktemp("llama"), "llama", max_position_embeddings=4096)
    stack = Stack(model, worker_ports(1, 1), options=[], redis_url=None)
    with stack.running("--strict-fields"):
        yield stack


@pytest.fixture
def handed_off(stack: Stack) -> Iterator[None]:
    """Fails a test that used the stack without a handoff, or left something behind."""
    before = stack.gateway.metric("baton_handoffs_total", outcome="completed")
    yield
    stack.gateway.wait_for_baseline()
    assert stack.gateway.metric("baton_handoffs_total", outcome="completed") > before


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter that has the clients of programs/."""
    found = environments.python()
    if found is None:
        miss("the clients are not installed; `make test-clients` does that")
    return found


@pytest.fixture(scope="session")
def node(pytestconfig: pytest.Config) -> environments.Node:
    """Node, with the client that node/package.json names."""
    assert pytestconfig.cache is not None
    found = environments.find_node(pytestconfig.cache.mkdir("clients"))
    if found is None:
        miss("there is no node, or no npm, on PATH")
    return found
