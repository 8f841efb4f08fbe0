"""Strategies that draw requests: sane ones with fields that are wrong, missing, unknown, huge, or cut in pieces."""

import gzip
from dataclasses import dataclass, field
from typing import Any

import orjson
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from protos import inference_pb2

_EDGES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    5,
    20,
    0.5,
    1.0,
    -0.0,
    1e308,
    2**31,
    2**53,
    2**63,
    2**64 - 1,
    -(2**63),
]
_TEXTS = [
    "",
    "a",
    "Hi",
    "auto",
    "m",
    "other",
    "none",
    "json",
    "user",
    "text",
    "é日🙂",
    "\x00",
    "\ud800"[:0],
    "a" * 300,
    "<|im_end|>",
]
_FORMS = [
    "a+",
    "(a|b)*c",
    "(a{1000}){1000}",
    "[",
    "(",
    'start: "a"',
    'root ::= "x" root | "y"',
    "root ::= root",
    "{}",
    "{",
]
_SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
    {"type": "strin"},
    {"enum": [1, "a", None]},
    {"type": "string", "pattern": "(a+)+$", "maxLength": 10},
    {"type": "string", "pattern": "("},
    {"minimum": 5, "maximum": 1, "type": "integer"},
    {"$ref": "http://127.0.0.1:1/x"},
]
_KNOWN: dict[str, list[Any]] = {
    "model": ["m", "other"],
    "query": ["Hi", "", {"text": "Hi"}, ["Hi"], "a b " * 400],
    "text_1": ["Hi", ["a", "b"], ["a"] * 1025, [{"text": "a"}], []],
    "documents": [["a", "b"], [{"text": "a"}], [], ["a"] * 1025, [""]],
    "prompt": ["Hi", "", [5, 6], [[5], [6]], ["a", "b"], [], [-1], [10**6], [2**40], ["a"] * 1025, [[]], "a b " * 400],
    "messages": [
        [{"role": "user", "content": "Hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": None}],
        [{"role": "system", "content": "a", "name": "b"}, {"role": "assistant", "content": "c", "reasoning": "d"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}]}],
        [{"role": "tool", "content": [{"type": "image_url"}, {"type": "refusal", "refusal": "a"}], "tool_call_id": 5}],
        [
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"a'}}, {"custom": {"name": "c"}}],
            }
        ],
        [{"role": "assistant", "function_call": {"name": "f", "arguments": [1]}}, {"role": "function", "name": "f"}],
        [{}],
    ],
    "texts": [["Hi"], ["a", "b c"], [], [5], "Hi"],
    "input": ["Hi", [5, 6], ["a", [5]], [{"role": "user", "content": "Hi"}], [{"type": "function_call"}], [{}], 5],
    "tools": [
        [{"type": "function", "function": {"name": "f", "parameters": schema}} for schema in _SCHEMAS[:1]],
        [{"type": "function", "name": "f", "parameters": _SCHEMAS[2]}],
        [{"name": "f", "input_schema": _SCHEMAS[0]}],
        [{"type": "web_search"}],
        *(
            [{"type": "custom", "custom": {"name": "c", "format": {"type": "grammar", "grammar": grammar}}}]
            for syntax in ("lark", "regex")
            for form in _FORMS
            for grammar in ({"syntax": syntax, "definition": form},)
        ),
    ],
    "tool_choice": ["auto", "required", {"type": "any"}, {"type": "function", "function": {"name": "f"}}],
    "system": ["a", [{"type": "text", "text": "a"}], [{"type": "image"}]],
    "thinking": [{"type": "enabled", "budget_tokens": 4}, {"type": "disabled"}, {"type": "enabled"}],
    "text": [{"format": {"type": "json_schema", "name": "a", "schema": schema}} for schema in _SCHEMAS],
    "previous_response_id": ["resp_1"],
    "truncate_prompt_tokens": [-1, 1, 5],
    "token_ids": [[5, 6], [10**6], [-1], [], [[5]], ["a"]],
    "sampling_params": [
        {},
        {"max_tokens": 5, "n": 2},
        {"temperature": 9},
        {"stop": ["a"], "logprobs": 2},
        {"seed": "a"},
    ],
    "tokens": [[5, 6], [10**6], [-1], []],
    "stop": ["a", ["a", "b"], ["a"] * 65],
    "n": [1, 2, 128, 129],
    "max_tokens": [1, 5, 16, 0, 2**70],
    "logit_bias": [{"5": 1}, {"5": 101}, {"x": 1}, {"77": 1, "077": 1}],
    "stream_options": [{"include_usage": True}, {"a": 1}],
    "response_format": [
        {"type": "json_object"},
        {"type": "text"},
        *({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}} for schema in _SCHEMAS),
    ],
    "structured_outputs": [
        *({"json": schema} for schema in _SCHEMAS),
        *({kind: form} for kind in ("regex", "grammar", "json") for form in _FORMS),
        {"choice": ["a", "b"]},
    ],
    "chat_template_kwargs": [{"a": 1}, {"messages": []}, {"tools": 5}],
    "bad_words": [["a"], [""], ["a" * 1025]],
}
_HEADERS = [
    {},
    {"Content-Type": "text/plain"},
    {"Content-Type": "application/json; charset=latin-1"},
    {"Content-Encoding": "gzip"},
    {"Content-Encoding": "br"},
    {"Transfer-Encoding": "chunked"},
    {"x-slo-ttft-ms": "1"},
    {"x-slo-ttft-ms": "-1"},
    {"x-request-id": "a b"},
    {"x-request-id": "\u00e9"},
]


@dataclass(frozen=True)
class HttpRequest:
    """A POST. gzipped: the body is sent zipped."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def sent(self) -> bytes:
        """The body as it goes over the wire."""
        return gzip.compress(self.body, 1) if self.headers.get("Content-Encoding") == "gzip" else self.body


# All strategies are made once: making one takes longer than drawing from it.
_SCALARS = st.sampled_from(_EDGES) | st.sampled_from(_TEXTS) | st.floats(allow_nan=False, allow_infinity=False)
_LISTS = st.lists(_SCALARS, max_size=3) | st.dictionaries(st.sampled_from(_TEXTS), _SCALARS, max_size=3)
_VALUES = _SCALARS | _SCALARS | _LISTS | st.lists(_LISTS, max_size=2)
_PROMPTS: tuple[str, ...] = ("prompt", "messages", "tokens", "input", "texts", "token_ids", "query", "text_1")
_NEEDED: dict[str, dict[str, Any]] = {
    "/v1/messages": {"max_tokens": 5},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "Hi"}]] * 2},
    "/inference/v1/generate": {"sampling_params": {}},
    **{path: {"documents": ["a", "b"]} for path in ("/v1/rerank", "/v2/rerank", "/rerank")},
    **{path: {"text_2": ["a", "b"]} for path in ("/v1/score", "/score")},
}
_BYTES = st.binary(max_size=8)
_BAD_BYTES = st.sampled_from([b"[" * 70, b'{"a":' * 70, b"9" * 400, b"\xff", b"\\ud800"])
_THIRDS, _QUARTERS, _EIGHTHS = (st.integers(0, top) for top in (2, 3, 7))
_OFFSETS = st.integers(0, 1 << 12)
_SOME_HEADERS = st.sampled_from(_HEADERS)
_KNOWN_VALUES = {name: st.sampled_from(values) for name, values in _KNOWN.items()}


def _damaged(draw: st.DrawFn, body: bytes) -> bytes:
    at = draw(_OFFSETS) % (len(body) + 1)
    match draw(_THIRDS):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + draw(_BYTES) + body[at:]
        case _:
            return body[:at] + draw(_BAD_BYTES) + body[at:]


def http_requests(fields: dict[str, list[str]]) -> st.SearchStrategy[HttpRequest]:
    """Draws requests. fields: by path, the names of the fields that its bodies may have."""
    return st.one_of([_http_requests(path, names) for path, names in sorted(fields.items())])


def _http_requests(path: str, names: list[str]) -> st.SearchStrategy[HttpRequest]:
    prompts = [name for name in _PROMPTS if name in names]
    some_names = st.lists(st.sampled_from([*names, "nobody"]), max_size=4)
    prompt = st.sampled_from(prompts)
    sane = _NEEDED.get(path, {})

    @st.composite
    def request(draw: st.DrawFn) -> HttpRequest:
        asked = draw(prompt)
        value: dict[str, Any] = {asked: _KNOWN[asked][0], **sane} if asked in _KNOWN else {**sane}
        for name in draw(some_names):
            known = name in _KNOWN_VALUES and draw(_QUARTERS) > 0
            value[name] = draw(_KNOWN_VALUES[name] if known else _VALUES)
        body = orjson.dumps(value) if _is_json(value) else b"{}"
        if draw(_EIGHTHS) == 0:
            body = _damaged(draw, body)
        return HttpRequest(path, body, draw(_SOME_HEADERS) if draw(_EIGHTHS) == 0 else {})

    return request()


def _is_json(value: object) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits
        return False
    return True


@dataclass(frozen=True)
class GrpcCall:
    """A call of a method of baton.v1.Inference, with the bytes of its request."""

    method: str
    streams: bool
    body: bytes


def grpc_calls() -> st.SearchStrategy[GrpcCall]:
    """Draws calls of every method."""
    methods = inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods
    return st.one_of(
        [
            st.builds(
                GrpcCall, st.just(method.name), st.just(bool(method.server_streaming)), _messages(method.input_type)
            )
            for method in methods
        ]
    )


@st.composite
def _messages(draw: st.DrawFn, kind: Descriptor) -> bytes:
    message = getattr(inference_pb2, kind.name)()
    _fill(draw, message, 0)
    body: bytes = message.SerializeToString()
    return _damaged(draw, body) if draw(_EIGHTHS) == 0 else body


def _fill(draw: st.DrawFn, message: Message, depth: int) -> None:
    """Sets some fields of a message, and of the messages in it."""
    fields = message.DESCRIPTOR.fields
    for _ in range(draw(_QUARTERS) if fields else 0):
        chosen = fields[draw(_OFFSETS) % len(fields)]
        value = getattr(message, chosen.name)
        if chosen.message_type is not None and chosen.message_type.GetOptions().map_entry:
            _fill_map(draw, value, chosen.message_type, depth)
        elif chosen.message_type is not None:
            for _ in range(draw(_THIRDS) if chosen.is_repeated else 1):
                inner = value.add() if chosen.is_repeated else value
                inner.SetInParent()
                if depth < 6:
                    _fill(draw, inner, depth + 1)
        elif chosen.is_repeated:
            value.extend(draw(_scalar(chosen)) for _ in range(draw(_QUARTERS)))
        else:
            setattr(message, chosen.name, draw(_scalar(chosen)))


def _fill_map(draw: st.DrawFn, container: Any, entry: Any, depth: int) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    for _ in range(draw(_THIRDS)):
        name = draw(_scalar(key))
        if value.message_type is None:
            container[name] = draw(_scalar(value))
        elif depth < 6:
            _fill(draw, container[name], depth + 1)


_STRINGS = st.sampled_from([*_TEXTS, *_FORMS])
_BOOLEANS = st.booleans()
_REALS = st.sampled_from([0.0, 0.5, 1.0, -1.0, 2.5, 1e300, float("nan"), float("inf"), float("-inf")])
_UNSIGNED = st.sampled_from([0, 1, 2, 5, 16, 128, 300, 2**31, 2**32 - 1])
_SIGNED = st.sampled_from([0, 1, -1, 5, 2**31 - 1, -(2**31)])


def _scalar(of: Any) -> st.SearchStrategy[Any]:
    match of.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return _STRINGS
        case FieldDescriptor.CPPTYPE_BOOL:
            return _BOOLEANS
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return _REALS
        case FieldDescriptor.CPPTYPE_UINT32 | FieldDescriptor.CPPTYPE_UINT64:
            return _UNSIGNED
        case _:
            return _SIGNED
