"""The playground, over a real stack: answers that stream, several side by side, and requests as code that runs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.clients.environments import NAMED, node
from tests.console.browser import Browser
from tests.console.conftest import Keyed, console, console_at_api
from tests.console.test_tenants import ASKED, enter
from tests.e2e.stack import Stack
from tests.machine import miss

FURTHER, TOOLS, SCHEMA = "Further fields, as JSON", "Tools, as JSON", "JSON schema of the answer"
WHOLE_LENGTH = '{"ignore_eos": true}'


def an_object(**properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@pytest.fixture
def playground(browser: Browser, stack: Stack) -> Iterator[Browser]:
    browser.open(console(stack.gateway, "playground"))
    browser.wait_for("h1", "Playground")
    yield browser
    assert browser.errors("the server responded with a status of 400") == []  # the browser's own word of a refusal
    assert browser.run("return window.violations") == []


def send(browser: Browser, message: str) -> None:
    browser.fill("Message", message)
    browser.press("Send")


def test_an_answer_streams_and_says_who_served_it(playground: Browser, stack: Stack):
    playground.fill("Most tokens", "24")
    playground.fill(FURTHER, WHOLE_LENGTH)
    send(playground, "Tell me something")
    playground.wait_for(".served", "24 generated")
    pair = f"Prefill worker 127.0.0.1:{stack.ports['prefill-0']} handed over to decode worker 127.0.0.1:"
    playground.wait_for(".served", pair)
    served = playground.texts(".served")[0]
    assert "first token after" in served
    assert "tokens/s" in served
    assert playground.texts(".choice .text")[0]
    playground.find(".served a").click()
    playground.wait_for("table.phases tfoot")
    playground.go("playground")  # the chat is still there, and its fields
    assert playground.texts(".served") == [served]
    assert playground.field("Most tokens").get_attribute("value") == "24"


def test_a_chat_goes_on_from_what_was_said(playground: Browser):
    """Each request has all messages before it, so its prompt is longer."""
    playground.fill("Most tokens", "5")
    prompts = []
    for number in (1, 2):
        send(playground, "Once more")
        playground.wait_until(lambda: len(answered(playground)) == number, f"answer {number}")  # noqa: B023
        prompts.append(int(answered(playground)[-1].split(" prompt tokens")[0].split()[-1]))
    assert prompts[0] < prompts[1]
    assert [message["role"] for message in copied_messages(playground)] == ["user", "assistant", "user"]


def copied_messages(browser: Browser) -> list[dict[str, Any]]:
    """The messages of the request as code, whose view is closed again."""
    browser.press("curl")
    code = browser.texts(".code-view code")[0]
    browser.press("Close")
    assert browser.driver.switch_to.active_element.text == "curl"  # the keyboard goes back to where it was
    body = code.partition("-d '")[2].removesuffix("'").replace("'\\''", "'")  # as a shell reads it
    messages: list[dict[str, Any]] = json.loads(body)["messages"]
    return messages


def answered(browser: Browser) -> list[str]:
    """What is said below each answer that is complete."""
    return [text for text in browser.texts(".served") if "generated" in text]


@pytest.mark.long
def test_several_answers_stand_side_by_side_with_their_logprobs(playground: Browser):
    """Tokens are walked with the keyboard, and each shows its alternatives."""
    playground.fill("Most tokens", "6")
    playground.fill("Answers (n)", "3")
    playground.field("Logprobs, as colours").click()
    playground.fill(FURTHER, WHOLE_LENGTH)
    send(playground, "Three ways")
    playground.wait_for(".served", "18 generated")
    tops = playground.run("return Array.from(document.querySelectorAll('.choice'), (each) => each.offsetTop)")
    assert len(tops) == 3
    assert len(set(tops)) == 1
    tokens = playground.all(".choice:first-child .token")
    assert [token.get_attribute("tabindex") for token in tokens] == ["0", *["-1"] * 5]
    tokens[0].send_keys(Keys.ARROW_RIGHT)
    assert playground.driver.switch_to.active_element == tokens[1]
    playground.wait_for(".choice:first-child [role=tooltip]", "%")
    alternatives = playground.all(".choice:first-child [role=tooltip] tr")
    assert len(alternatives) in (5, 6)  # the token itself may be among the five likeliest
    tokens[3].click()
    assert [token.get_attribute("tabindex") for token in tokens].count("0") == 1


@pytest.mark.long
def test_an_answer_can_be_stopped(playground: Browser, stack: Stack):
    """The workers are told too."""
    playground.fill("Most tokens", "3000")
    playground.fill(FURTHER, WHOLE_LENGTH)
    send(playground, "Go on for ever")
    assert playground.driver.switch_to.active_element.text == "Stop"  # Send cannot be pressed now
    playground.wait_until(lambda: "".join(playground.texts(".choice .text")), "some text")
    playground.press("Stop")
    playground.wait_for(".served", "stopped")
    assert playground.driver.switch_to.active_element.text == "Send"
    stack.gateway.wait_for_baseline()
    playground.find(".served a").click()
    playground.wait_for(".told", "The client left before the end")
    assert playground.texts(".page-head .badge") == ["done"]


def test_a_field_that_is_no_json_says_so(playground: Browser):
    playground.fill(TOOLS, "[{")
    send(playground, "With a tool")
    playground.wait_for(".error", "It is no JSON")
    assert playground.driver.switch_to.active_element.get_attribute("aria-invalid") == "true"
    assert playground.all(".turn") == []


@pytest.mark.long
def test_a_schema_holds_and_a_refusal_is_shown(playground: Browser):
    playground.fill(SCHEMA, json.dumps(an_object(yes={"type": "boolean"})))
    send(playground, "Is it so?")
    playground.wait_for(".choice .text", '"yes"')
    playground.wait_for(".served", "generated")
    playground.fill(SCHEMA, '{"type": "no such type"}')
    send(playground, "And now?")
    playground.wait_for(".turn .why", "HTTP 400")


def test_a_call_of_a_tool_is_answered_with_its_result(playground: Browser):
    tool = {"type": "function", "function": {"name": "dice", "parameters": an_object(sides={"enum": [6]})}}
    playground.fill(TOOLS, json.dumps([tool]))
    playground.choose("Tool choice", "required")
    playground.fill("Answers (n)", "2")
    send(playground, "Roll")
    playground.wait_for(".choice:last-child .calls .call", "dice(")
    playground.wait_for(".served", "generated")
    for result in playground.all(".choice:last-child .calls textarea"):  # it may have called several times
        result.send_keys("4")
    send_results = playground.all(".choice:last-child form button")[-1]
    playground.fill(FURTHER, "[{")
    send_results.send_keys(Keys.ENTER)
    playground.wait_for(".error", "It is no JSON")  # nothing is sent, so it can be sent again
    playground.fill(FURTHER, "")
    playground.choose("Tool choice", "none")
    playground.fill("Most tokens", "5")
    send_results.send_keys(Keys.ENTER)
    playground.wait_until(lambda: len(answered(playground)) == 2, "the second answer")
    assert not send_results.is_enabled()
    _, calls, *results = copied_messages(playground)
    assert [call["id"] for call in calls["tool_calls"]] == [result["tool_call_id"] for result in results]


@pytest.mark.long
def test_results_of_tools_that_were_not_answered_can_be_sent_again(playground: Browser):
    tool = {"type": "function", "function": {"name": "dice", "parameters": an_object(sides={"enum": [6]})}}
    playground.fill(TOOLS, json.dumps([tool]))
    playground.choose("Tool choice", "required")
    send(playground, "Roll")
    playground.wait_for(".served", "generated")
    for result in playground.all(".calls textarea"):
        result.send_keys("4")
    playground.fill(FURTHER, '{"temperature": 99}')  # is refused
    playground.press("Send results")
    playground.wait_for(".turn .why", "HTTP 400")
    playground.fill(FURTHER, "")
    playground.choose("Tool choice", "none")
    playground.fill("Most tokens", "5")
    playground.press("Send results")
    playground.wait_until(lambda: len(answered(playground)) == 2, "the answer to the results")


def code_of(browser: Browser, keyed: Keyed, language: str) -> str:
    """A request as code with a tenant's key, which a placeholder stands for: the key itself is nowhere in it."""
    browser.open(console_at_api(keyed.gateway, "playground"))
    enter(browser, keyed.keys.acme)
    browser.wait_for("h1", "Playground")
    browser.fill("Most tokens", "4")
    browser.fill("System prompt", 'It\'s "quoted"')
    browser.fill(FURTHER, '{"ignore_eos": true, "top_k": 1}')
    browser.fill("Message", "What's this?\nTwo lines")
    browser.press(language)
    browser.wait_for(".code-view code", "YOUR_KEY")
    code = browser.texts(".code-view code")[0]
    assert keyed.keys.acme not in code
    assert browser.errors(ASKED) == []
    return code.replace("YOUR_KEY", keyed.keys.acme)


def printed(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


RUNS = [("curl", ["sh", "-c"]), pytest.param("Python", [sys.executable, "-c"], marks=pytest.mark.long)]


@pytest.mark.parametrize(("language", "runs"), RUNS)
def test_a_request_as_code_runs(browser: Browser, keyed: Keyed, language: str, runs: list[str]):
    answer = printed(*runs, code_of(browser, keyed, language))
    assert answer.strip()
    assert '"error"' not in answer


@pytest.mark.long
def test_a_request_as_javascript_runs(browser: Browser, keyed: Keyed):
    """With OpenAI's client, which is installed beside it."""
    found = node(NAMED) or miss("OpenAI's client for Node is not installed: `make test-clients` does")
    program = found.home / "copied.mjs"
    program.write_text(code_of(browser, keyed, "JavaScript"))
    assert printed(found.path, str(program)).strip()
