"""OpenCode over all three APIs, with the AI SDK's providers that it brings."""

import json
from typing import Any

import pytest

from tests.clients.environments import Node
from tests.clients.place import Place
from tests.clients.scripted_gateway import MAX_MODEL_LEN, ScriptedGateway
from tests.clients.scripted_model import calls, says
from tests.gateway.running_api import MODEL

pytestmark = pytest.mark.long
PROVIDERS = {"chats": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai", "messages": "@ai-sdk/anthropic"}
QUIET = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}
PLUGINS = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}  # else it asks npm's registry for them


def provider_of(npm: str, url: str, model: str, context: int) -> dict[str, Any]:
    """What a user writes of a server."""
    return {
        "npm": npm,
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {model: {"tool_call": True, "limit": {"context": context, "output": 4096}}},
    }


def configure(place: Place, url: str) -> None:
    """Writes the configuration, with the server as a provider for each API."""
    provider = {name: provider_of(npm, url, MODEL, MAX_MODEL_LEN) for name, npm in PROVIDERS.items()}
    place.write("opencode.json", json.dumps({"autoupdate": False, "share": "disabled", "provider": provider}))
    plugins = place.home / ".config" / "opencode"
    (plugins / "node_modules").mkdir(parents=True)
    (plugins / "package-lock.json").write_text(json.dumps(PLUGINS))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_it_works_with_tools_over_three_rounds_and_goes_on(
    node: Node, gateway: ScriptedGateway, place: Place, provider: str
):
    notes = place.write("notes.txt", "The word is heron.\n")
    gateway.model.plans = {
        "work": [
            calls("bash", command="echo one > made.txt", description="Makes a file"),
            calls("read", filePath=str(notes)),
            calls("write", filePath=str(place.work / "found.txt"), content="heron\n"),
            says("All is done."),
        ],
        "more": [says("It goes on.")],
    }
    configure(place, gateway.url)

    def run(*words: str) -> str:
        command = [node.program("opencode"), "run", "--model", f"{provider}/{MODEL}", *words]
        return place.run(*command, variables=QUIET, enter=gateway.enter)

    assert "All is done." in run("Follow plan:work.")
    assert (place.read("made.txt"), place.read("found.txt")) == ("one\n", "heron\n")
    assert any("The word is heron." in prompt for prompt in gateway.model.prompts)
    assert "It goes on." in run("--continue", "Follow plan:more.")
    assert "All is done." in gateway.model.prompts[-1]
