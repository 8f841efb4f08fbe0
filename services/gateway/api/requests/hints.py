"""Hints: fields that ask for nothing which the correctness of an answer depends on.

A hint that nothing acts on is left out and named in the header IGNORED_FIELDS; `--strict-fields` refuses it by name. A
demand, which changes what a client may rely on, is refused instead: see `validation.Neutral`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import GetJsonSchemaHandler, ModelWrapValidatorHandler, PrivateAttr, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from services.gateway.api.requests.strict import Open

# The JSON schema of a hint's values that are left out, in `anyOf` beside that of those which it takes.
LEFT_OUT: Mapping[str, str] = {"description": "Any other value is ignored."}

_NUMBER = re.compile(r"\[\d+\]")

_ACCOUNT = "it is the client's accounting"
_EDITS = "it leaves earlier turns out of the prompt, which stay in it"
_THERE = "every tool is there from the start, and may be called"
_UNREADABLE = "it holds nothing that a model here can read"
_EFFORT = "how much a model reasons is its own matter where its chat template does not read the wish"
_HOSTED = "only its vendor's servers run it, or its vendor's models know it"
_LENGTH = "how much a model writes is its own matter"
_MEDIA = "it says how media are read, and no request has any"
_PRICE = "it chooses a price or a place of the vendor's"
_CACHE = "every prompt's prefixes are cached, for as long as there is room"

# Each hint's path, and the reason why an answer is right without it. A name is the same hint in every API, and `[]` any
# entry of a list.
HINTS: Mapping[str, str] = {
    "billing_policy": _PRICE,
    "compaction": _EDITS,
    "container": _HOSTED,
    "context_management": "it leaves earlier turns out of the prompt, which stay in it",
    "diagnostics": "it asks for notes about the answer",
    "fallback_credit_token": _PRICE,
    "fallbacks": "the model that is named answers",
    "guided_decoding_backend": "a form is the same with every program that holds an answer to it",
    "include[]": "what cannot be made is not in an answer, and is not needed in the next request",
    "inference_geo": _PRICE,
    "input_type": "the model's files have no prompt for it; one that the model was trained with is a part of the text",
    "input[]": _UNREADABLE,
    "input[].content[]": _UNREADABLE,
    "input[].encrypted_content": _UNREADABLE,
    "input[].output[]": "a line of text stands in the place of what is no text",
    "input[].tools[]": _HOSTED,
    "input[].tools[].tools[]": _HOSTED,
    "mcp_servers": _HOSTED,
    "media_io_kwargs": _MEDIA,
    "messages[].citations": _ACCOUNT,
    "messages[].content[]": _UNREADABLE,
    "messages[].content[].citations": _ACCOUNT,
    "messages[].content[].content[]": _UNREADABLE,
    "messages[].reasoning": _UNREADABLE,
    "messages[].reasoning_content": _UNREADABLE,
    "metadata": _ACCOUNT,
    "metadata.user_id": _ACCOUNT,
    "mm_processor_kwargs": _MEDIA,
    "output_config.effort": _EFFORT,
    "output_config.task_budget": _LENGTH,
    "prediction": "it makes a known answer come faster, and changes no token",
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
    "reasoning.effort": _EFFORT,
    "reasoning.generate_summary": "the reasoning itself is shown",
    "reasoning.summary": "the reasoning itself is shown",
    "reasoning_effort": _EFFORT,
    "return_token_offsets": "where tokens are in a prompt changes no answer; the endpoints that render say it",
    "service_tier": _PRICE,
    "speed": _PRICE,
    "store": "an answer is not kept where nothing can fetch it",
    "system.x-anthropic-billing-header": _ACCOUNT,
    "text.verbosity": _LENGTH,
    "thinking": "a model that reasons always does so where its chat template cannot switch that off",
    "thinking.budget_tokens": "a model that does not reason keeps every budget",
    "thinking.display": "the reasoning is shown",
    "thinking.token_budget": "a model that does not reason keeps every budget",
    "thinking_token_budget": "a model that does not reason keeps every budget",
    "tools[]": _HOSTED,
    "tools[].allowed_callers": _THERE,
    "tools[].defer_loading": _THERE,
    "tools[].eager_input_streaming": "every answer is streamed as it comes",
    "tools[].input_examples": "no chat template shows examples",
    "tools[].type": _THERE,
    "tools[].tools[]": _HOSTED,
    "verbosity": _LENGTH,
    "web_search_options": _HOSTED,
}


def reason_of(path: str) -> str | None:
    """Returns the reason why an answer is right without the hint at a path, `tools[1]`; None: there is no such hint."""
    return HINTS.get(_NUMBER.sub("[]", path))


class Hinting(Open):
    """A model that leaves a hint out where its value is none that the field takes.

    hints: the fields that are hints.
    """

    hints: ClassVar[frozenset[str]] = frozenset()

    _left_out: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _without_unknown_hints(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(value)
        except ValidationError as error:
            wrong = {details["loc"][0] for details in error.errors(include_url=False) if details["loc"]}
            left_out = sorted(cls.hints & wrong)
            if not left_out:
                raise
        made = handler({name: field for name, field in value.items() if name not in left_out})
        made._left_out = tuple(left_out)
        return made

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Returns a schema that takes every value of a hint, as validation does."""
        reference = handler(core_schema)
        fields = handler.resolve_ref_schema(reference)["properties"]
        for name in cls.hints & fields.keys():
            if values := fields[name].get("anyOf"):  # else it takes every value
                fields[name] = {**fields[name], "anyOf": [*values, {**LEFT_OUT}]}
        return reference

    def unknown_fields(self) -> Iterator[str]:
        """See Open."""
        yield from self._left_out
        yield from super().unknown_fields()
