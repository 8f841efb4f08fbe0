"""Translates gRPC requests to the fields of OpenAI requests, so that one set of rules checks both."""

from collections.abc import Sequence
from typing import Any

from protos import inference_pb2
from services.gateway.api.errors import invalid
from services.gateway.grpc_api.chats import chat_fields

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
    "echo",
    "request_id",
)
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logprob_token_ids")
_SLICE = 16_384  # token ids


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
            return chat_fields(request.chat)
        case "token_ids":
            assert isinstance(request, inference_pb2.GenerateRequest)
            return {"prompt": _token_ids(request.token_ids.ids)}
        case _:
            return {"prompt": request.text}


def _token_ids(ids: Sequence[int]) -> list[int]:
    """Copies token ids in slices: one call would keep the interpreter lock all the time."""
    return [token for start in range(0, len(ids), _SLICE) for token in ids[start : start + _SLICE]]


def embedding_fields(request: inference_pb2.EmbedRequest) -> dict[str, Any]:
    """The fields of a request for embeddings beside its model. Raises ApiError for an input that is empty."""
    optional = ("dimensions", "normalize", "add_special_tokens", "truncate_prompt_tokens")
    plain = ("pooling", "truncation_side", "cache_salt", "priority", "request_id")
    fields = {name: getattr(request, name) for name in optional if request.HasField(name)}
    fields |= {name: getattr(request, name) or None for name in plain}
    return {"input": [_input(one) for one in request.inputs], **fields}


def _input(one: inference_pb2.EmbedInput) -> str | list[int]:
    match one.WhichOneof("input"):
        case "text":
            return one.text
        case "token_ids":
            return _token_ids(one.token_ids.ids)
        case _:
            raise invalid("Missing an input: each is text or token_ids.", "input")
