"""Clients that run as programs of their own: libraries that cannot share Baton's environment, and Node."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import FOLDER, Node
from tests.e2e.stack import Stack

pytestmark = pytest.mark.usefixtures("handed_off")
PROGRAMS = sorted(path.stem for path in (FOLDER / "programs").glob("with_*.py"))
ROOT = FOLDER.parents[1]
ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches a list of prices
    "LANGSMITH_TRACING": "false",
    "PYTHONPATH": str(ROOT),
    "PYTHONDONTWRITEBYTECODE": "",  # compiles what is imported once, of libraries that are installed uncompiled
}


def run(*command: str) -> None:
    """Runs a program to its end; what it printed is the failure's text."""
    environment = os.environ | ENVIRONMENT
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_library_does_what_it_promises(stack: Stack, python: Path, program: str):
    run(str(python), "-m", f"tests.clients.programs.{program}", stack.gateway.url)


def test_node_gets_chats_tools_and_responses(stack: Stack, node: Node):
    run(*node.command("with_openai.js"), stack.gateway.url)
