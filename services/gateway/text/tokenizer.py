"""The model's tokenizer, read from the model's files with the library `tokenizers`.

`tokenizers` decodes; a faster library encodes where it gives the same ids (fast_encoder.py). Nothing here depends on a
request, and one instance serves all of them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import tokenizers
from tokenizers.decoders import ByteLevel

from services.gateway.text.cuts import TextCuts
from services.gateway.text.fast_encoder import encode_with, make_fast_encoder, probe_of
from services.protocol.model_files.base import ModelError, ModelFiles

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"

# Longer texts are tokenized in a thread, so that streams do not wait. So many take some 10 ms, 1 to 4 by `fastokens`.
LONG_TEXT_CHARS = 32_768

_FAST_TOKENIZER = "PreTrainedTokenizerFast"  # the class in `transformers` that reads any tokenizer.json


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """Two texts as the tokens of one prompt.

    token_ids: int32[n]. num_cut: tokens of both texts that are not among them. second_text: the index of the first
    token of type 1; 0: there is none.
    """

    token_ids: np.ndarray
    num_cut: int
    second_text: int


class Tokenizer:
    """Encodes text, and knows the bytes of each token.

    backend: decodes, for `Detokenizer`.
    byte_level: True when a text is nothing but the bytes of its tokens, one after the other.
    special_tokens: `bos_token` and the like, for chat templates.
    special_ids: tokens that are not text.
    added_tokens: tokens beside the model's vocabulary, by their text; special ones and others.
    marks: tokens that stand in texts as marks, as `<tool_call>`, by how they are written. A grammar's text has none.
    cuts: the places at which a long text may be cut.
    whole_texts: by token, its text where that is whole characters; None where it is not, or the token is special.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._fast = make_fast_encoder(backend)
        self.byte_level = isinstance(backend.decoder, ByteLevel)
        self.special_tokens = dict(special_tokens)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self._added_ids = frozenset(added)
        self.marks = {token.content: token_id for token_id, token in added.items() if token.special or _is_mark(token)}
        self._byte_alphabet = _byte_level_alphabet()
        self._bytes_of: dict[int, bytes] = {}  # filled as tokens are met
        self.whole_texts = _WholeTexts(self)
        vocab = backend.get_vocab(with_added_tokens=True)
        self._longest_token = max(map(len, vocab), default=1)
        encode = partial(self.encode, add_special_tokens=False)
        self.cuts = TextCuts(encode, self._words, map(self._read_bytes, vocab.values()), probe_of(backend))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def exceeds(self, text: str, num_tokens: int) -> bool:
        """True when `text` surely has more than `num_tokens` tokens, which is known without tokenizing it."""
        lossless = self.byte_level and self.backend.normalizer is None
        return lossless and len(text) > num_tokens * self._longest_token

    def encode(self, text: str, *, add_special_tokens: bool) -> np.ndarray:
        """Returns token ids, int32[n]. Special tokens that are written out in `text` are recognised either way.

        Takes as long as the text is, and releases the interpreter lock meanwhile.
        """
        if self._fast is None:
            return encode_with(self.backend, text, add_special_tokens=add_special_tokens)
        return self._fast.encode(text, add_special_tokens=add_special_tokens)

    def encode_with_offsets(self, text: str, *, add_special_tokens: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns token ids, int32[n], and where each token is in `text`: its [start, end) in characters, int32[n, 2].

        Characters are code points, as in Python's strings. Several tokens of one character have the same place, and a
        special token that was added has (0, 0). Takes longer than `encode`; releases the interpreter lock meanwhile.
        """
        # `encode` does not release it, and `fastokens` knows no offsets.
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ends = (end for place in encoding.offsets for end in place)  # sooner an array than pairs are
        return np.array(encoding.ids, np.int32), np.fromiter(ends, np.int32).reshape(-1, 2)

    def encode_truncated(
        self, text: str, most: int, *, from_left: bool, add_special_tokens: bool
    ) -> tuple[np.ndarray, int]:
        """Returns token ids, int32[n], at most `most` of them: of the text's, some go, and special tokens stay.

        And how many went. from_left: the text's first tokens go, and not its last ones. Releases the interpreter lock.
        """
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=False)
        num_whole = len(encoding.ids)
        room = most - (self.backend.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0)
        encoding.truncate(max(0, room), direction="left" if from_left else "right")
        num_cut = num_whole - len(encoding.ids)
        whole = self.backend.post_process(encoding, None, add_special_tokens)
        return np.array(whole.ids[:most], np.int32), num_cut

    def encode_pair(self, texts: tuple[str, str], most: int | None, *, from_left: bool) -> EncodedPair:
        """Returns two texts with the special tokens of a pair, at most `most` tokens. Where there are more, they go one
        after the other of the longer text. from_left: a text's first tokens go, and not its last ones. Releases the
        interpreter lock.
        """
        first, second = self.backend.encode_batch_fast([*texts], add_special_tokens=False)
        num_whole = room = len(first.ids) + len(second.ids)
        if most is not None:
            room = min(room, max(0, most - self.backend.num_special_tokens_to_add(is_pair=True)))
        kept = longest_first(len(first.ids), len(second.ids), room)
        for encoding, length in zip((first, second), kept, strict=True):
            encoding.truncate(length, direction="left" if from_left else "right")
        whole = self.backend.post_process(first, second, True)
        second_text = whole.type_ids.index(1) if 1 in whole.type_ids else 0
        return EncodedPair(np.array(whole.ids, np.int32), num_whole - room, second_text)

    def check_token_types(self) -> None:
        """Raises ModelError unless the tokens of a pair have type 0 up to a place, and type 1 from there on."""
        types: Sequence[int] = self.backend.encode("a", "b").type_ids
        if [*types] != sorted(types) or not {*types} <= {0, 1}:
            raise ModelError(
                f"tokenizer.json: a pair of texts has tokens of the types {[*types]}: 0 and then 1 are supported"
            )

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids. Releases the interpreter lock."""
        # `decode` does not release it.
        (text,) = self.backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token's text in UTF-8, maybe not whole characters. Empty: the vocabulary lacks the token."""
        found = self._bytes_of.get(token_id)
        if found is None:
            found = self._bytes_of[token_id] = self._read_bytes(token_id)
        return found

    def _words(self, text: str) -> list[tuple[int, int]]:
        """Returns where the words of a text begin and end, in characters; none for a tokenizer that knows no words."""
        rules = self.backend.pre_tokenizer
        return [] if rules is None else [place for _, place in rules.pre_tokenize_str(text)]

    def _read_bytes(self, token_id: int) -> bytes:
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self.byte_level and all(char in self._byte_alphabet for char in piece):
            return b"".join(self._byte_alphabet[char] for char in piece)
        if self.byte_level or token_id in self._added_ids:
            return piece.encode()
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if _SPACE_MARK in piece:
            return piece.replace(_SPACE_MARK, " ").encode()
        return self.backend.decode([token_id]).encode()


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns how many tokens stay of two texts, where tokens go of the longer one, and of equal ones of the second."""
    if first + second <= room:
        return first, second
    half = room // 2
    if second <= half:
        return room - second, second
    return (first, room - first) if first <= room - half else (room - half, half)


class _WholeTexts(dict[int, str | None]):
    """Texts by token, filled as tokens are met, and read once for each token of a stream."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        try:
            special = token_id in self._tokenizer.special_ids
            text = None if special else self._tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


def _is_mark(token: tokenizers.AddedToken) -> bool:
    """True for tokens that llguidance keeps apart from text, whether or not the tokenizer calls them special."""
    return token.content.startswith("<") and token.content.endswith(">")


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Reads the model's tokenizer and the names of its special tokens. Raises ModelError."""
    content = files.tokenizer()
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"the tokenizer of {files.path} cannot be read: {error}") from error
    return Tokenizer(backend, files.special_tokens())


def read_tokenizer_info(files: ModelFiles) -> dict[str, object]:
    """Reads what a model says of its tokenizer: tokenizer_config.json, its template in one form. Raises ModelError."""
    config = files.tokenizer_config()
    template, class_name = files.chat_template(), config.get("tokenizer_class") or _FAST_TOKENIZER
    return {**config, **files.special_tokens(), "tokenizer_class": class_name, "chat_template": template}


def _byte_level_alphabet() -> dict[str, bytes]:
    """The printable characters that byte-level BPE writes instead of bytes (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    table.update({chr(256 + index): bytes([byte]) for index, byte in enumerate(others)})
    return table
