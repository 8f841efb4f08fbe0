"""The AI SDK with each of its providers that takes a server's URL."""

import json

import pytest

from tests.clients.environments import Node
from tests.clients.place import Place
from tests.clients.scripted_gateway import ScriptedGateway
from tests.clients.scripted_model import Round, calls, says

pytestmark = pytest.mark.long
PROVIDERS = ("openai chat", "openai responses", "anthropic", "compatible", "open responses")
PARIS, ROME = {"city": "Paris", "days": 1}, {"city": "Rome", "days": 2}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_tools_streams_and_forms(node: Node, gateway: ScriptedGateway, place: Place, provider: str):
    gateway.model.plans = {
        "weather": [
            Round(calls=(("weather", PARIS), ("weather", ROME))),
            calls("weather", **PARIS),
            calls("weather", **ROME),
            says("It rains."),
        ],
        "object": [calls("json", **ROME) if provider == "anthropic" else says(json.dumps(ROME))],
    }
    place.run(*node.command("with_ai_sdk.js"), gateway.url, provider, enter=gateway.enter)
