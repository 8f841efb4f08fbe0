"""Clients that run as programs of their own: libraries that cannot share Baton's environment, and Node."""

from pathlib import Path

import pytest

from tests.clients.environments import PROGRAMS, PYTHON_VARIABLES, Node
from tests.clients.place import Place
from tests.e2e.stack import Stack

pytestmark = pytest.mark.usefixtures("handed_off")
LIBRARIES = sorted(path.stem for path in PROGRAMS.glob("with_*.py"))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_does_what_it_promises(stack: Stack, python: Path, place: Place, library: str):
    command = [str(python), "-m", f"tests.clients.programs.{library}", stack.gateway.url]
    place.run(*command, variables=PYTHON_VARIABLES)


def test_node_gets_chats_tools_and_responses(stack: Stack, node: Node, place: Place):
    place.run(*node.command("with_openai.js"), stack.gateway.url)
