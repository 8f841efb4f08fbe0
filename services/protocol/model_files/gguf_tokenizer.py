"""A tokenizer.json made of a GGUF file's vocabulary: byte-level BPE, and SentencePiece's BPE of Llama 2.

A file names the way in which a text is cut into words (`tokenizer.ggml.pre`) but does not hold the pattern:
`BYTE_LEVEL` has the known names, and any other is refused. Byte-level texts are cut as the models' own tokenizer.json
cuts them, SentencePiece's as llama.cpp does, with a space before each part of a text that no special token interrupts.
"""

import json
import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from services.protocol.model_files.base import ModelError
from services.protocol.model_files.gguf_header import GgufHeader

_SPACE = "▁"  # SentencePiece's mark for a space
_LONGEST_MERGED = 512  # characters; longer tokens are no words, so no merges make them
_NAMES = {  # a special token's name in chat templates, and in the file
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # as the format spells it
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
_START = "tokenizer.ggml."
# Entries that are read, here or in gguf_config.py, and entries that mean nothing for texts without a gap to fill.
_KNOWN = frozenset(
    {"model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token", "add_space_prefix"}
    | {f"{name}_token_id" for name in (*_NAMES.values(), "eot", "eom")}
    | {"eos_token_ids", "token_type_count", "prefix_token_id", "suffix_token_id", "middle_token_id"}
    | {f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")}
)
_ONLY = {"add_sep_token": False, "remove_extra_whitespaces": False}  # entries that are supported with one value alone
# Words of Qwen2, with digits one at a time, and of Llama 3, with up to three at a time.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenKind(IntEnum):
    """The kinds of tokens; the format's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Words:
    """The way in which a kind of byte-level BPE cuts a text. before: steps before bytes become characters."""

    before: tuple[dict[str, Any], ...]
    gpt2_words: bool = False  # words are cut once more, as by GPT-2
    normalizer: str | None = None
    ignores_merges: bool = False  # a word that is a token stays one, whatever the merges are
    adds_bos: bool = False  # if the file does not say


def _cut(digits: str) -> tuple[dict[str, Any], ...]:
    pattern = {"Regex": _WORDS.format(digits=digits)}
    return ({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},)


_LLAMA3 = _Words(_cut("{1,3}"), ignores_merges=True, adds_bos=True)
_QWEN2 = _Words(_cut(""), normalizer="NFC")
BYTE_LEVEL = {  # by tokenizer.ggml.pre
    "gpt-2": _Words((), gpt2_words=True),
    "smollm": _Words(({"type": "Digits", "individual_digits": True},), gpt2_words=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def special_tokens(header: GgufHeader) -> dict[str, str]:
    """Returns the texts of the special tokens that the file names. Raises ModelError."""
    tokens = _tokens(header)
    return {name: tokens[id] for name, id in special_ids(header).items()}


def special_ids(header: GgufHeader) -> dict[str, int]:
    """Returns the ids of the special tokens that the file names; for a SentencePiece vocabulary that names none,
    Llama's.

    Files name tokens that do not exist (-1, say) if a model has no such token. Raises ModelError for such an id of a
    token that texts need.
    """
    is_llamas = header.text("tokenizer.ggml.model") == "llama"
    defaults = {"bos_token": 1, "eos_token": 2, "unk_token": 0} if is_llamas else {}
    found, num_tokens = dict[str, int](), len(_tokens(header))
    for name, theirs in _NAMES.items():
        id = header.metadata.get(f"tokenizer.ggml.{theirs}_token_id", defaults.get(name))
        if isinstance(id, int) and not isinstance(id, bool) and 0 <= id < num_tokens:
            found[name] = id
        elif id is not None and name in ("bos_token", "eos_token", "unk_token"):
            raise ModelError(f"{header.path.name}: {name} is token {id!r}, of {num_tokens}")
    return found


def token_kinds(header: GgufHeader) -> list[int]:
    """Returns the kind of each token. Raises ModelError."""
    kinds, tokens = header.items("tokenizer.ggml.token_type", int), _tokens(header)
    if len(kinds) != len(tokens):
        raise ModelError(f"{header.path.name}: {len(tokens)} tokens have {len(kinds)} kinds")
    return kinds


def make_tokenizer(header: GgufHeader) -> bytes:
    """Makes a tokenizer.json of the file's tokenizer. Raises ModelError if it is of another kind."""
    where, model = header.path.name, header.text("tokenizer.ggml.model")
    _check_known(header)
    if model == "gpt2":
        name = header.text("tokenizer.ggml.pre")
        if name is None:
            raise ModelError(f"{where} has no tokenizer.ggml.pre, so it is from before 2024: convert the model again")
        if name not in BYTE_LEVEL:
            known = ", ".join(BYTE_LEVEL)
            raise ModelError(f"{where}: tokenizer.ggml.pre {name!r} is not supported (supported: {known})")
        made, adds_bos = _byte_level(header, BYTE_LEVEL[name]), BYTE_LEVEL[name].adds_bos
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


def _check_known(header: GgufHeader) -> None:
    for key, value in header.metadata.items():
        name = key.removeprefix(_START)
        if key.startswith(_START) and name not in _KNOWN and (name not in _ONLY or value != _ONLY[name]):
            raise ModelError(f"{header.path.name}: {key} {value!r:.60} is not supported")


def _byte_level(header: GgufHeader, words: _Words) -> dict[str, Any]:
    as_characters = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words.gpt2_words
    }  # fmt: skip
    merges = header.items("tokenizer.ggml.merges", str)
    return {
        "normalizer": None if words.normalizer is None else {"type": words.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words.before, as_characters]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": _bpe(_tokens(header), [merge.split(" ", 1) for merge in merges], ignore_merges=words.ignores_merges),
    }


def _sentencepiece(header: GgufHeader) -> dict[str, Any]:
    """Makes a tokenizer like Llama 2's: a space before the text, marks for spaces, bytes for text without a token."""
    tokens, scores = _tokens(header), header.items("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
        raise ModelError(f"{header.path.name}: {len(tokens)} tokens have {len(scores)} scores, or some are no numbers")
    to_marks: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    to_text: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if header.flag("tokenizer.ggml.add_space_prefix", True):
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
    """Makes the merges of a SentencePiece vocabulary: the two neighbours that make the token with the best score merge
    first.

    If several pairs make one token, the pair with the lowest ids comes first, as in `transformers`.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    found = []
    for token, index in ids.items():
        for cut in range(1, len(token) if len(token) <= _LONGEST_MERGED else 0):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
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
    """Returns tokens that are recognised as a whole in any text; those that are not text are special."""
    is_special: dict[int, bool] = {TokenKind.UNKNOWN: True, TokenKind.CONTROL: True, TokenKind.USER_DEFINED: False}
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": is_special[kind],
        }
        for index, (token, kind) in enumerate(zip(_tokens(header), token_kinds(header), strict=True))
        if kind in is_special
    ]


def _post_processor(header: GgufHeader, adds_bos: bool) -> dict[str, Any] | None:
    """Puts BOS before and EOS after a text, if the file wants them; None: neither."""
    named = special_tokens(header)
    wants = {
        "bos_token": header.flag("tokenizer.ggml.add_bos_token", adds_bos),
        "eos_token": header.flag("tokenizer.ggml.add_eos_token", False),
    }
    ids = special_ids(header)
    around = [name for name, wanted in wants.items() if wanted and name in ids]
    if not around:
        return None

    def template(text: str) -> list[dict[str, Any]]:
        before, after = (
            [{"SpecialToken": {"id": named[name], "type_id": 0}}] if name in around else [] for name in wants
        )
        return [*before, {"Sequence": {"id": text, "type_id": 0}}, *after]

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": [*template("A"), *template("B")],
        "special_tokens": {
            named[name]: {"id": named[name], "ids": [ids[name]], "tokens": [named[name]]} for name in around
        },
    }


def _tokens(header: GgufHeader) -> list[str]:
    return header.items("tokenizer.ggml.tokens", str)
