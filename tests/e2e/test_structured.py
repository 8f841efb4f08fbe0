"""Structured output through the whole stack: every answer was handed off, and has the form that was asked for."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.conftest import prompt_of
from tests.e2e.schema_answers import ask_all
from tests.e2e.schemas import draw
from tests.e2e.stack import Stack, running_stack, wait_until
from tests.faults.case import busiest

NUM_SCHEMAS = 100
DIGITS = {"type": "regex", "pattern": "[0-9]{1,5}"}
CALL = {"type": "tag", "begin": "<f=a>", "content": DIGITS, "end": "</f>"}
ADDRESS = "([0-9a-f]{2}:){99}[0-9a-f]{2}"
WARM: dict[str, Any] = {"model": "tiny", "temperature": 1.0}


@pytest.fixture(scope="module")
def stack(llama: Path) -> Iterator[Stack]:
    """A prefill worker and two decode workers."""
    with running_stack(llama, decode=2, options=["--max-num-batched-tokens", "37"]) as running:
        yield running


def complete(stack: Stack, structured: dict[str, Any], seed: int = 0, **fields: Any) -> Any:
    return stack.gateway.client.completions.create(
        prompt=prompt_of(900 + seed, 40),
        extra_body={"structured_outputs": structured},
        **{**WARM, "seed": seed, "max_tokens": 400, **fields},
    )


@pytest.mark.long
def test_answers_validate_against_schemas_of_every_kind(stack: Stack):
    """500 by `python -m tests.e2e.schema_answers`."""
    outcome = ask_all(stack, draw(NUM_SCHEMAS), num_kills=1)
    print(outcome)
    assert (outcome.invalid, outcome.refused) == ({}, {})
    assert len(outcome.stopped) >= 0.95 * NUM_SCHEMAS
    assert outcome.kills == 1
    assert outcome.continued > 0
    assert outcome.handed_off > 0.9 * NUM_SCHEMAS
    wait_until(stack.gateway.at_baseline)


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-z]{2,4}"}, "[0-9]{3}-[a-z]{2,4}"),
        ({"choice": ["yes", 'no "thanks"', "größer"]}, '(yes|no "thanks"|größer)'),
        ({"choice": ["one"]}, "one"),
        ({"grammar": 'start: "a" digits "b"\ndigits: /[0-9]{1,5}/'}, "a[0-9]{1,5}b"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        ({"structural_tag": {"format": CALL}}, r"(?s)<f=a>\d{1,5}</f>"),
    ],
)
def test_every_form_and_every_choice(stack: Stack, structured: dict[str, Any], pattern: str):
    answer = complete(stack, structured, 5, n=3, logprobs=2)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(pattern, choice.text)
        assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs)
    streamed = {0: "", 1: "", 2: ""}
    for chunk in complete(stack, structured, 5, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == {choice.index: choice.text for choice in answer.choices}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("digits", "dash", "fields"),
    [
        (False, True, {}),
        (True, False, {}),
        (True, True, {"logit_bias": True}),
        (True, True, {"bad_words": ["-"]}),
    ],
    ids=["never begun", "not gone on with", "biased", "a bad word"],
)
def test_a_form_without_a_token_that_may_come_is_refused_after_one_attempt(
    stack: Stack, digits: bool, dash: bool, fields: dict[str, Any], stream: bool
):
    """The form begins with a digit, goes on with a dash, and ends with a digit."""
    gateway = stack.gateway

    def token(text: str) -> int:
        tokens = gateway.client.post(
            f"{gateway.url}/tokenize", cast_to=dict[str, Any], body={"prompt": text, "add_special_tokens": False}
        )["tokens"]
        assert len(tokens) == 1
        return int(tokens[0])

    body: dict[str, Any] = {"structured_outputs": {"regex": "[0-9]-[0-9]"}, **fields}
    body["allowed_token_ids"] = [token(text) for text in "0123456789" * digits + "-" * dash]
    if "logit_bias" in fields:
        body["logit_bias"] = {str(token("-")): -100}
    wanted = {**WARM, "max_tokens": 20, "prompt": prompt_of(950, 40), "extra_body": body}
    before = gateway.metric("baton_attempts_total")
    with pytest.raises(openai.APIError, match="The answer cannot go on") as refused:
        list(gateway.client.completions.create(stream=stream, **wanted))
    assert isinstance(refused.value, openai.BadRequestError) or stream
    assert refused.value.code == "no_token_left"
    assert gateway.metric("baton_attempts_total") == before + 1
    wait_until(gateway.at_baseline)


@pytest.mark.long
def test_an_answer_goes_on_in_its_grammar_when_its_worker_dies(stack: Stack):
    expected = complete(stack, {"regex": ADDRESS}, 7).choices[0].text
    assert re.fullmatch(ADDRESS, expected)
    text, killed = "", False
    for chunk in complete(stack, {"regex": ADDRESS}, 7, stream=True):
        text += chunk.choices[0].text
        if len(text) > 60 and not killed:
            killed = True
            stack.workers[busiest(stack, "decode")].kill()
    assert killed
    assert text == expected
    stack.heal()


def test_the_official_client_parses_a_chat(stack: Stack):
    class Answer(BaseModel):
        kind: bool
        year: int

    schema = {
        "type": "object",
        "properties": {"kind": {"type": "boolean"}, "year": {"type": "integer", "minimum": 1900, "maximum": 2100}},
        "required": ["kind", "year"],
        "additionalProperties": False,
    }
    named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    chat: Any = stack.gateway.client.chat.completions.create(
        messages=[{"role": "user", "content": "Which year?"}], response_format=named, max_tokens=50, **WARM
    )
    answer = Answer.model_validate_json(chat.choices[0].message.content)
    assert 1900 <= answer.year <= 2100
    assert chat.choices[0].finish_reason == "stop"


def test_a_grammar_that_no_worker_could_follow_is_refused(stack: Stack):
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="unclosed group"):
        complete(stack, {"regex": "a(b"})
    wait_until(stack.gateway.at_baseline)
