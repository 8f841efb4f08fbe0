"""Clients that loop over tools, or ask for forms in a way of their own, with a model that follows a plan."""

import json
from pathlib import Path

import pytest

from tests.clients.environments import PYTHON_VARIABLES, Node
from tests.clients.place import Place
from tests.clients.scripted_gateway import ScriptedGateway
from tests.clients.scripted_model import Round, calls, says

pytestmark = pytest.mark.long
PARIS, ROME = {"city": "Paris", "days": 3}, {"city": "Rome", "days": 1}
TOOL_RUNNER = {
    "weather": [
        Round(calls=(("weather", PARIS), ("weather", ROME))),
        calls("weather", **PARIS),
        calls("weather", **ROME),
        says("It rains."),
    ]
}
BRIDGE = {"weather": [calls("Weather", **PARIS), calls("Weather", **ROME), says("It rains.")]}
FORMS = {
    "call": [calls("Weather", **PARIS)],
    "partial-call": [calls("PartialWeather", **PARIS)],
    "calls": [Round(calls=(("Weather", PARIS), ("Weather", ROME)))],
    "text": [says(json.dumps(PARIS))],
    "markdown": [says(f"```json\n{json.dumps(PARIS)}\n```")],
}


def run(python: Path, gateway: ScriptedGateway, place: Place, program: str) -> None:
    command = [str(python), "-m", f"tests.clients.programs.planned.{program}", gateway.url]
    place.run(*command, variables=PYTHON_VARIABLES, enter=gateway.enter)


def test_instructor_in_every_mode(python: Path, gateway: ScriptedGateway, place: Place):
    gateway.model.plans = FORMS
    run(python, gateway, place, "with_instructor")


def test_litellm_between_both_vendors_apis(python: Path, gateway: ScriptedGateway, place: Place):
    gateway.model.plans = BRIDGE
    run(python, gateway, place, "with_litellm")


def test_anthropics_tool_runner_for_python(python: Path, gateway: ScriptedGateway, place: Place):
    gateway.model.plans = TOOL_RUNNER
    gateway.may_refuse = 3  # each run of the runner asks for a thread first
    run(python, gateway, place, "with_anthropic")


def test_anthropics_tool_runner_for_typescript(node: Node, gateway: ScriptedGateway, place: Place):
    gateway.model.plans = TOOL_RUNNER
    gateway.may_refuse = 2
    place.run(*node.command("with_anthropic.js"), gateway.url, enter=gateway.enter)
