"""Claude Code, as its maker ships it: tools, an agent of its own, an image, a conversation that goes on."""

import json
from typing import Any

import pytest

from tests.clients.environments import Node
from tests.clients.families import FAMILIES
from tests.clients.place import PNG, Place
from tests.clients.scripted_gateway import ScriptedGateway
from tests.clients.scripted_model import calls, says
from tests.gateway.running_api import MODEL

pytestmark = pytest.mark.long
QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
AS_ROOT = {"IS_SANDBOX": "1"}  # else it refuses to run without permissions


def settings(url: str, model: str | None) -> dict[str, str]:
    """What a user sets."""
    server = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none"}
    return server if model is None else {**server, "ANTHROPIC_MODEL": model}


class Claude:
    """Runs Claude Code in one place."""

    def __init__(self, node: Node, place: Place, gateway: ScriptedGateway) -> None:
        self.place = place
        self.gateway = gateway
        self._program = node.program("claude")

    def __call__(self, prompt: str, *options: str, model: str | None = MODEL) -> dict[str, Any]:
        """Runs it for one prompt. Returns what it says of itself at the end. model: None: the one that it prefers."""
        variables = {**settings(self.gateway.url, model), **QUIET, **AS_ROOT}
        command = [self._program, "-p", prompt, "--output-format", "json", "--dangerously-skip-permissions", *options]
        printed = self.place.run(*command, variables=variables, enter=self.gateway.enter)
        told: dict[str, Any] = json.loads(printed)
        assert not told["is_error"], told
        return told


@pytest.fixture
def claude(node: Node, place: Place, gateway: ScriptedGateway) -> Claude:
    return Claude(node, place, gateway)


@pytest.mark.parametrize("gateway", FAMILIES, indirect=True)
def test_it_works_with_tools_over_three_rounds_and_goes_on(claude: Claude):
    notes = claude.place.write("notes.txt", "The word is heron.\n")
    claude.gateway.model.plans = {
        "work": [
            calls("Bash", command="echo one > made.txt", description="Makes a file"),
            calls("Read", file_path=str(notes)),
            calls("Write", file_path=str(claude.place.work / "found.txt"), content="heron\n"),
            says("All is done."),
        ],
        "more": [says("It goes on.")],
    }
    told = claude("Follow plan:work.")
    assert (told["result"], told["num_turns"]) == ("All is done.", 4)
    assert str(claude.place.work) in claude.gateway.model.prompts[0]
    assert (claude.place.read("made.txt"), claude.place.read("found.txt")) == ("one\n", "heron\n")
    assert "The word is heron." in claude.gateway.model.prompts[-1]
    assert claude("Follow plan:more.", "--continue")["result"] == "It goes on."
    assert "All is done." in claude.gateway.model.prompts[-1]


def test_a_model_of_its_vendors_that_it_asks_for_by_itself(claude: Claude):
    claude.gateway.model.plans = {"work": [calls("Bash", command="ls", description="Lists"), says("All is done.")]}
    told = claude("Follow plan:work.", model=None)
    assert told["result"] == "All is done."
    assert all(name.startswith("claude-") for name in told["modelUsage"])


def test_an_agent_of_its_own_answers_it(claude: Claude):
    claude.gateway.model.plans = {
        "ask": [
            calls("Agent", description="Finds", prompt="Follow plan:find.", subagent_type="general-purpose"),
            says("The agent is back."),
        ],
        "find": [calls("Bash", command="echo 1917", description="Says a year"), says("Found 1917.")],
    }
    assert claude("Follow plan:ask.")["result"] == "The agent is back."
    assert "Found 1917." in claude.gateway.model.prompts[-1]


def test_an_image_that_it_reads_does_not_end_the_conversation(claude: Claude):
    image = claude.place.write("pixel.png", PNG)
    claude.gateway.model.plans = {"look": [calls("Read", file_path=str(image)), says("I see none.")]}
    assert claude("Follow plan:look.")["result"] == "I see none."
