"""The groups of /openapi.json, and an example of a request for each path that takes a body or has a name in it."""

from collections.abc import Mapping
from typing import Any

# Groups in the order of the page; a path is in the first one with a beginning of it.
TAGS: Mapping[str, tuple[str, ...]] = {
    "Chats and completions": ("/v1/chat/", "/v1/completions"),
    "Responses": ("/v1/responses",),
    "Messages": ("/v1/messages",),
    "Scores": ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
    "Cohere": ("/v2/",),
    "Embeddings": ("/v1/embeddings", "/pooling"),
    "Models and tokens": ("/v1/models", "/inference/", "/tokenize", "/detokenize", "/tokenizer_info"),
    "Server": ("/",),
}
TAG_WORDS = {
    "Chats and completions": "OpenAI's API, streamed and whole; and what a request would be to a worker (render).",
    "Responses": "OpenAI's Responses API: conversations that the server keeps.",
    "Messages": "Anthropic's Messages API.",
    "Scores": "vLLM's endpoints for how well texts belong together, at the paths that Jina and Cohere have too.",
    "Cohere": "Cohere's API, version 2: chats and vectors of texts.",
    "Embeddings": "OpenAI's API for vectors of texts, and vLLM's.",
    "Models and tokens": "The model that is served, and its tokenizer.",
    "Server": "Whether it serves, and what it is.",
}

_QUESTION = {"role": "user", "content": "What is the capital of France?"}
_CHAT = {"messages": [_QUESTION], "max_tokens": 32}
_COMPLETION = {"prompt": "The capital of France is", "max_tokens": 16}
_RANKED = {"query": "What is the capital of France?", "documents": ["It is Paris.", "Cats sleep."], "top_n": 1}
_SCORED = {"text_1": "What is a capital?", "text_2": ["A city.", "A cat."]}

BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/chat/completions/batch": {
        "messages": [[_QUESTION], [{"role": "user", "content": "And of Italy?"}]],
        "max_tokens": 32,
    },
    "/v1/chat/completions/render": _CHAT,
    "/v1/completions": _COMPLETION,
    "/v1/completions/render": _COMPLETION,
    "/v1/embeddings": {"input": ["A text.", "Another one."]},
    "/pooling": {"input": ["A text.", "Another one."]},
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), _RANKED),
    **dict.fromkeys(("/v1/score", "/score"), _SCORED),
    "/v1/responses": {"input": "What is the capital of France?", "max_output_tokens": 32},
    "/v1/responses/render": {"input": "What is the capital of France?", "max_output_tokens": 32},
    "/v1/messages": {"messages": [_QUESTION], "max_tokens": 32},
    "/v1/messages/count_tokens": {"messages": [_QUESTION]},
    "/v1/messages/render": {"messages": [_QUESTION], "max_tokens": 32},
    "/v2/chat": {"messages": [_QUESTION], "max_tokens": 32},
    "/v2/embed": {"texts": ["A text.", "Another one."], "input_type": "search_document"},
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 16}},
    "/tokenize": {"prompt": "The capital of France is Paris."},
    "/detokenize": {"tokens": [1, 2, 3]},
}
NAMES = {"response_id": "resp_0123456789abcdef"}  # examples of what stands in a path, a model's name aside


def tag_of(path: str) -> str:
    """Returns the group of a path."""
    return next(tag for tag, starts in TAGS.items() if path.startswith(starts))
