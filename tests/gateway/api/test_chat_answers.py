"""The variables of chat templates that an effort sets, under the names that families of models have for them."""

from typing import Any

import pytest

from services.gateway.api.dialects.chat_answers import ChatAnswers, ChatModel
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.text.model_output.forms import find_forms
from services.gateway.text.tokenizer import Tokenizer
from tests.gateway.tokenizer_files import byte_level

TOKENIZER = Tokenizer(byte_level(), {})
DEEPSEEK = "{% if not thinking %}</think>{% else %}<think>{% endif %}"
SMOLLM = "{% if enable_thinking %}<think>{% endif %}</think>"
CHANNELS = "<|start|><|channel|><|message|><|end|>{{ m.thinking }}{{ reasoning_effort }}"


@pytest.mark.parametrize(
    ("template", "effort", "variables"),
    [
        (DEEPSEEK, "high", {"thinking": True}),
        (DEEPSEEK, "none", {"thinking": False}),
        (SMOLLM, "none", {"enable_thinking": False}),
        (SMOLLM, "low", {"enable_thinking": True}),
        (CHANNELS, "high", {"reasoning_effort": "high"}),
        (CHANNELS, "none", {"reasoning_effort": "low"}),
        ("{{ m.thinking }}</think>", "high", None),
        ("{{ 'thinking' }}</think>", "high", None),
    ],
)
def test_the_effort_has_the_name_that_the_template_reads(
    template: str, effort: str, variables: dict[str, Any] | None
) -> None:
    answers = ChatAnswers(ChatModel(None, find_forms(None, template)), TOKENIZER)
    messages = [{"role": "user", "content": "x"}]
    request = ChatRequest.model_validate({"model": "m", "messages": messages, "reasoning_effort": effort})
    named = answers.variables(request, template)
    assert {name: named[name] for name in variables or {}} == (variables or {})
    assert list(answers.ignored(request, template)) == (["reasoning_effort"] if variables is None else [])
