"""Translates gRPC requests to the fields of OpenAI requests, so that one set of rules checks both."""

import re
from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import Error as JsonFormatError
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from protos import inference_pb2
from services.gateway.api.errors import ApiError, invalid

# Parameters that have their OpenAI name and are absent where the client did not set them.
_OPTIONAL = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "skip_special_tokens",
    "add_special_tokens",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "prompt_logprobs",
    "stream_interval",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
)
# Likewise, and empty, zero or false where the client did not set them.
_PLAIN = (
    "ignore_eos",
    "include_stop_str_in_output",
    "return_token_ids",
    "truncation_side",
    "cache_salt",
    "session_id",
    "priority",
)
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logprob_token_ids")
_SLICE = 16_384  # token ids
# OpenAI's name of a field, and its name here, where they differ.
_CHAT_NAMES = {
    "messages": "chat.messages",
    "chat_template_kwargs": "chat.template_kwargs",
    "documents": "chat.documents",
    "chat_template": "chat.chat_template",
    "add_generation_prompt": "chat.add_generation_prompt",
    "continue_final_message": "chat.continue_final_message",
    "top_logprobs": "logprobs",
}


def which_prompt(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> str:
    """Returns `text`, `token_ids` or `chat`. Raises ApiError when there is no prompt."""
    which: str | None = request.WhichOneof("prompt")
    if which is None:
        kinds = ", ".join(field.name for field in request.DESCRIPTOR.oneofs_by_name["prompt"].fields)
        raise invalid(f"Missing the prompt: one of {kinds}.", "prompt")
    return which


def other_fields(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> dict[str, Any]:
    """The fields of a request beside its model and its prompt."""
    if isinstance(request, inference_pb2.TokenizeRequest):
        return {"add_special_tokens": request.add_special_tokens} if request.HasField("add_special_tokens") else {}
    fields = {name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)}
    fields |= {name: getattr(request, name) or None for name in _PLAIN}
    fields |= {name: list(getattr(request, name)) or None for name in _LISTS}
    fields["logit_bias"] = {str(token): bias for token, bias in request.logit_bias.items()} or None
    if request.HasField("structured_outputs"):
        fields["structured_outputs"] = _structured(request.structured_outputs)
    if request.HasField("logprobs"):
        chat = request.WhichOneof("prompt") == "chat"
        fields |= {"logprobs": True, "top_logprobs": request.logprobs} if chat else {"logprobs": request.logprobs}
    return fields


def _structured(wanted: inference_pb2.StructuredOutputs) -> dict[str, Any]:
    form = wanted.WhichOneof("form")
    if form is None:
        return {}
    value = getattr(wanted, form)
    return {
        form: list(value.texts) if isinstance(value, inference_pb2.Choices) else value,
        "whitespace_pattern": wanted.whitespace_pattern if wanted.HasField("whitespace_pattern") else None,
        "disable_any_whitespace": wanted.disable_any_whitespace or None,
        "disable_additional_properties": wanted.disable_additional_properties or None,
    }


def prompt_fields(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> dict[str, Any]:
    """The fields of a request's prompt."""
    match which_prompt(request):
        case "chat":
            return _chat_fields(request.chat)
        case "token_ids":
            assert isinstance(request, inference_pb2.GenerateRequest)
            return {"prompt": _token_ids(request.token_ids.ids)}
        case _:
            return {"prompt": request.text}


def _token_ids(ids: Sequence[int]) -> list[int]:
    """Copies token ids in slices: one call would keep the interpreter lock all the time."""
    return [token for start in range(0, len(ids), _SLICE) for token in ids[start : start + _SLICE]]


def _chat_fields(chat: inference_pb2.Chat) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "messages": [_message(message) for message in chat.messages],
        "continue_final_message": chat.continue_final_message,
    }
    if chat.HasField("template_kwargs"):
        fields["chat_template_kwargs"] = _values(chat.template_kwargs, "chat_template_kwargs")
    if chat.documents:
        fields["documents"] = [_values(document, "documents") for document in chat.documents]
    if chat.chat_template:
        fields["chat_template"] = chat.chat_template
    if chat.HasField("add_generation_prompt"):
        fields["add_generation_prompt"] = chat.add_generation_prompt
    return fields


def _values(struct: Message, param: str) -> dict[str, Any]:
    """The values of a Struct. Raises ApiError where JSON has none of them. param: the field, by OpenAI's name."""
    try:
        values: dict[str, Any] = MessageToDict(struct)
    except (ValueError, JsonFormatError) as error:  # NaN, an infinity
        raise invalid(f"Invalid '{param}': it has a number that is not finite.", param) from error
    return values


def _message(message: inference_pb2.Message) -> dict[str, Any]:
    name = {"name": message.name} if message.HasField("name") else {}
    return {"role": message.role, "content": message.content, **name}


def embedding_fields(request: inference_pb2.EmbedRequest) -> dict[str, Any]:
    """The fields of a request for embeddings beside its model. Raises ApiError for an input that is empty."""
    optional = ("dimensions", "normalize", "add_special_tokens", "truncate_prompt_tokens")
    fields = {name: getattr(request, name) for name in optional if request.HasField(name)}
    return {"input": [_input(one) for one in request.inputs], "pooling": request.pooling or None, **fields}


def _input(one: inference_pb2.EmbedInput) -> str | list[int]:
    match one.WhichOneof("input"):
        case "text":
            return one.text
        case "token_ids":
            return _token_ids(one.token_ids.ids)
        case _:
            raise invalid("Missing an input: each is text or token_ids.", "input")


def grpc_message(error: ApiError, request: Message) -> str:
    """The error's message, with the fields' names in this API."""
    oneof = request.DESCRIPTOR.oneofs_by_name.get("prompt")
    which = None if oneof is None else request.WhichOneof("prompt")
    names = _CHAT_NAMES if which == "chat" else {"prompt": which or "prompt", "input": "inputs"}
    if error.param is None:
        return error.message
    root = re.split(r"\W", error.param, maxsplit=1)[0]
    param = names.get(root, root) + error.param[len(root) :]
    message = error.message.replace(f"'{error.param}'", f"'{param}'")
    return f"{param}: {message}"
