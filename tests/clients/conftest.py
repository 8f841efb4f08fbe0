"""One stack for all clients, and the environments of those that have one of their own."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients import environments
from tests.clients.families import FAMILIES
from tests.clients.place import Place, make_place
from tests.clients.scripted_gateway import ScriptedGateway, scripted_gateway
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
def clients(pytestconfig: pytest.Config) -> Path:
    """Where clients are installed that have an environment of their own."""
    return environments.NEWEST if pytestconfig.getoption("newest") else environments.NAMED


@pytest.fixture(scope="session")
def python(clients: Path) -> Path:
    """The interpreter that has the clients of programs/."""
    found = environments.python(clients)
    if found is None:
        miss("the clients are not installed; `make test-clients` does that")
    return found


@pytest.fixture(scope="session")
def node(clients: Path) -> environments.Node:
    """Node, with the packages that node/package.json names."""
    found = environments.node(clients)
    if found is None:
        miss("there is no node on PATH, or no packages for it; `make test-clients` installs them")
    return found


@pytest.fixture(scope="session")
def gateways() -> Iterator[Callable[[str], ScriptedGateway]]:
    """Gives the gateway of a family of models, which runs from then on."""
    with contextlib.ExitStack() as running:
        yield functools.cache(lambda family: running.enter_context(scripted_gateway(FAMILIES[family])))


@pytest.fixture
def gateway(gateways: Callable[[str], ScriptedGateway], request: pytest.FixtureRequest) -> Iterator[ScriptedGateway]:
    """The gateway of the family that the test is parametrized with, or of one that has most of what there is.

    Fails a test whose client was refused more than it expects, spoke to anyone else, or got what no worker generates.
    """
    gateway = gateways(getattr(request, "param", "qwen3"))
    gateway.model.forget()
    gateway.may_refuse = 0
    before, elsewhere = gateway.answered(), gateway.num_elsewhere()
    yield gateway
    answered = gateway.answered() - before
    assert answered
    refused = sum(number for (_, status), number in answered.items() if status != "200")
    assert refused == gateway.may_refuse, answered
    assert gateway.num_elsewhere() == elsewhere
    assert gateway.model.excluded == []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Where a client is at home and works."""
    return make_place(tmp_path)
