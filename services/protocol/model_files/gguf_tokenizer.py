"""A tokenizer.json made of a GGUF file's vocabulary: byte-level BPE, and SentencePiece's BPE as Llama 2 has it.

A file names its way of cutting a text into words (`tokenizer.ggml.pre`) but does not hold it: the ways that are known
stand in `_BYTE_LEVEL`, and any other is refused. Each is what the models' own tokenizer.json has.
"""

import json
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from services.protocol.model_files.base import ModelError
from services.protocol.model_files.gguf_header import GgufHeader

_SPACE = "▁"  # SentencePiece writes it for a space
_NAMES = {  # of special tokens: a chat template's, and the file's
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # as the format spells it
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
# Words as Qwen2 cuts them, with digits one at a time, and as Llama 3 does, up to three at a time.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Kind(IntEnum):
    """What a token is; the format's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _ByteLevel:
    """A way to byte-level BPE. before: steps that cut a text, before bytes become characters."""

    before: tuple[dict[str, Any], ...]
    gpt2_words: bool = False  # cut once more, as GPT-2 does
    normalizer: str | None = None
    ignores_merges: bool = False  # a word that is a token stays one, whatever the merges make of it
    adds_bos: bool = False  # where the file does not say


def _cut(digits: str) -> tuple[dict[str, Any], ...]:
    pattern = {"Regex": _WORDS.format(digits=digits)}
    return ({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},)


_LLAMA3 = _ByteLevel(_cut("{1,3}"), ignores_merges=True, adds_bos=True)
_QWEN2 = _ByteLevel(_cut(""), normalizer="NFC")
_BYTE_LEVEL = {  # by tokenizer.ggml.pre
    "gpt-2": _ByteLevel((), gpt2_words=True),
    "smollm": _ByteLevel(({"type": "Digits", "individual_digits": True},), gpt2_words=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def special_tokens(header: GgufHeader) -> dict[str, str]:
    """The texts of the special tokens that the file names."""
    tokens = _tokens(header)
    ids = {ours: header.metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in _NAMES.items()}
    for name, token in ids.items():
        if token is not None and not (isinstance(token, int) and 0 <= token < len(tokens)):
            raise ModelError(f"{header.path.name}: {name} is token {token!r}, of {len(tokens)}")
    return {name: tokens[token] for name, token in ids.items() if token is not None}


def make_tokenizer(header: GgufHeader) -> bytes:
    """The file's tokenizer as a tokenizer.json. Raises ModelError where it is of another kind."""
    where, model = header.path.name, header.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        name = header.metadata.get("tokenizer.ggml.pre")
        if name not in _BYTE_LEVEL:
            known = ", ".join(_BYTE_LEVEL)
            raise ModelError(f"{where}: tokenizer.ggml.pre {name!r} is not supported (supported: {known})")
        made, adds_bos = _byte_level(header, _BYTE_LEVEL[name]), _BYTE_LEVEL[name].adds_bos
    elif model == "llama":
        made, adds_bos = _sentencepiece(header), True
    else:
        raise ModelError(f"{where}: tokenizer {model!r} is not supported (supported: gpt2, llama)")
    made |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(header),
        "post_processor": _post_processor(header, adds_bos),
    }
    return json.dumps(made, ensure_ascii=False).encode()


def _byte_level(header: GgufHeader, way: _ByteLevel) -> dict[str, Any]:
    as_characters = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": way.gpt2_words
    }  # fmt: skip
    merges = _list(header, "tokenizer.ggml.merges", str)
    return {
        "normalizer": None if way.normalizer is None else {"type": way.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*way.before, as_characters]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": _bpe(_tokens(header), [merge.split(" ", 1) for merge in merges], ignore_merges=way.ignores_merges),
    }


def _sentencepiece(header: GgufHeader) -> dict[str, Any]:
    """As Llama 2's tokenizer.json: a space before the text, then spaces as marks; bytes for what no token has."""
    tokens, scores = _tokens(header), _list(header, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ModelError(f"{header.path.name}: {len(tokens)} tokens have {len(scores)} scores")
    to_marks: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    to_text: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if header.metadata.get("tokenizer.ggml.add_space_prefix", True):
        to_marks.insert(0, {"type": "Prepend", "prepend": _SPACE})
        to_text.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = special_tokens(header).get("unk_token")
    return {
        "normalizer": {"type": "Sequence", "normalizers": to_marks},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": to_text},
        "model": _bpe(tokens, _merges_by_score(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """The merges of a SentencePiece vocabulary: of two neighbours, those whose union has the best score merge first.

    A union that can be had in several ways is had by the parts with the lowest ids, as in `transformers`.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    found = []
    for union, index in ids.items():
        for cut in range(1, len(union)):
            left, right = ids.get(union[:cut]), ids.get(union[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], index, left, right))
    found.sort()
    return [[tokens[left], tokens[right]] for _, _, left, right in found]


def _bpe(tokens: list[str], merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **settings,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": merges,
    }


def _added_tokens(header: GgufHeader) -> list[dict[str, Any]]:
    """Tokens that are recognised as a whole in any text; those that are not text are special."""
    kinds = _list(header, "tokenizer.ggml.token_type", int)
    whole = {_Kind.UNKNOWN: True, _Kind.CONTROL: True, _Kind.USER_DEFINED: False}  # whether they are special
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": whole[kind],
        }
        for index, (token, kind) in enumerate(zip(_tokens(header), kinds, strict=False))
        if kind in whole
    ]


def _post_processor(header: GgufHeader, adds_bos: bool) -> dict[str, Any] | None:
    """What stands before and after a text: BOS and EOS, where the file wants them."""
    named, metadata = special_tokens(header), header.metadata
    wants = {
        "bos_token": metadata.get("tokenizer.ggml.add_bos_token", adds_bos),
        "eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    around = {name: named[name] for name, wanted in wants.items() if wanted and name in named}
    if not around:
        return None

    def template(text: str) -> list[dict[str, Any]]:
        own: list[dict[str, Any]] = [{"Sequence": {"id": text, "type_id": 0}}]
        special = {
            name: [{"SpecialToken": {"id": token, "type_id": 0}}] for name, token in around.items()
        }  # fmt: skip
        return [*special.get("bos_token", []), *own, *special.get("eos_token", [])]

    ids = {named[name]: metadata[f"tokenizer.ggml.{_NAMES[name]}_token_id"] for name in around}
    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": [*template("A"), *template("B")],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]} for token, id in ids.items()},
    }


def _tokens(header: GgufHeader) -> list[str]:
    return _list(header, "tokenizer.ggml.tokens", str)


def _list(header: GgufHeader, key: str, kind: type) -> list[Any]:
    value = header.metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise ModelError(f"{header.path.name}: {key} is missing or no list of {kind.__name__}")
    return value
