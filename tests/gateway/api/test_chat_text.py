"""Prompts of chats that a job renders, from requests as Python has them."""

from typing import Any

import pytest

from services.gateway.api.dialects.chat import ChatDialect
from services.gateway.api.dialects.chat_answers import ChatModel
from services.gateway.api.errors import ApiError
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.side_thread import SideThread
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.model_output.forms import find_forms
from services.gateway.text.tokenizer import Tokenizer
from tests.gateway.running_processes import running_processes
from tests.gateway.tokenizer_files import byte_level

TOKENIZER = Tokenizer(byte_level(), {})


@pytest.mark.parametrize("value", [2**70, "\ud800", -(2**64)])
@pytest.mark.parametrize("field", ["chat_template_kwargs", "documents"])
async def test_a_value_that_json_lacks_is_not_said_to_be_nested_too_deeply(field: str, value: Any):
    fields = {field: {"x": value} if field == "chat_template_kwargs" else [{"x": value}]}
    messages = [{"role": "user", "content": "x"}]
    request = ChatRequest.model_validate({"model": "m", "messages": messages, "chat_template": "x", **fields})
    model = ChatModel(ChatTemplate("y", {}, replaceable=True), find_forms(None, "y"))
    async with running_processes(TOKENIZER) as processes:
        with pytest.raises(ApiError, match="it cannot be written as JSON") as refused:
            await ChatDialect(TOKENIZER, model, SideThread(), processes).prompts(request, 8, "a")
    assert refused.value.param == field
