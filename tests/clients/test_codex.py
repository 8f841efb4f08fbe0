"""Codex, as its maker ships it: four rounds of tools, an image, a conversation that goes on."""

import pytest

from tests.clients.environments import Node
from tests.clients.families import FAMILIES
from tests.clients.place import PNG, Place
from tests.clients.scripted_gateway import MAX_MODEL_LEN, ScriptedGateway
from tests.clients.scripted_model import calls, says
from tests.gateway.running_api import MODEL

pytestmark = pytest.mark.long
CONFIG = """\
model = "{model}"
model_provider = "baton"
model_context_window = {context}

[model_providers.baton]
name = "Baton"
base_url = "{url}/v1"
wire_api = "responses"
"""
QUIET = """
[analytics]
enabled = false

[feedback]
enabled = false

[features]
plugins = false
"""


class Codex:
    """Runs Codex in one place."""

    def __init__(self, node: Node, place: Place, gateway: ScriptedGateway) -> None:
        self.place = place
        self.gateway = gateway
        self._program = node.program("codex")
        (place.home / ".codex").mkdir()
        (place.home / ".codex" / "config.toml").write_text(
            CONFIG.format(model=MODEL, url=gateway.url, context=MAX_MODEL_LEN) + QUIET
        )

    def __call__(self, *words: str) -> str:
        """Runs it for one prompt. Returns its last message."""
        options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return self.place.run(self._program, "exec", *options, *words, enter=self.gateway.enter).strip()


@pytest.fixture
def codex(node: Node, place: Place, gateway: ScriptedGateway) -> Codex:
    return Codex(node, place, gateway)


@pytest.mark.parametrize("gateway", FAMILIES, indirect=True)
def test_it_works_with_tools_over_four_rounds_and_goes_on(codex: Codex):
    codex.place.write("notes.txt", "The word is heron.\n")
    codex.gateway.model.plans = {
        "work": [
            calls("exec_command", cmd="echo one > made.txt"),
            calls("exec_command", cmd="cat notes.txt"),
            calls("exec_command", cmd="echo heron > found.txt"),
            calls("exec_command", cmd="ls"),
            says("All is done."),
        ],
        "more": [says("It goes on.")],
    }
    assert codex("Follow plan:work.") == "All is done."
    assert str(codex.place.work) in codex.gateway.model.prompts[0]
    assert (codex.place.read("made.txt"), codex.place.read("found.txt")) == ("one\n", "heron\n")
    assert "The word is heron." in codex.gateway.model.prompts[-1]
    assert codex("resume", "--last", "Follow plan:more.") == "It goes on."
    assert "All is done." in codex.gateway.model.prompts[-1]


def test_a_model_that_it_knows_is_given_patches_to_write(codex: Codex):
    """They are a custom tool with a grammar, which the patches must match."""
    added = '*** Begin Patch\n*** Add File: hello.txt\n+Hello "you"\n+\\two\tö\n*** End Patch\n'
    updated = '*** Begin Patch\n*** Update File: hello.txt\n@@\n-Hello "you"\n+Bye\n*** End Patch\n'
    codex.gateway.model.plans = {
        "patch": [calls("apply_patch", input=added), calls("apply_patch", input=updated), says("All is patched.")]
    }
    assert codex("--model", "gpt-5.5", "Follow plan:patch.") == "All is patched."
    assert codex.place.read("hello.txt") == "Bye\n\\two\tö\n"


def test_an_image_that_it_views_does_not_end_the_conversation(codex: Codex):
    image = codex.place.write("pixel.png", PNG)
    codex.gateway.model.plans = {"look": [calls("view_image", path=str(image)), says("I see none.")]}
    assert codex("Follow plan:look.") == "I see none."
