"""Encodes text by the library `fastokens`, where it gives the same ids as the library `tokenizers`.

`fastokens` has BPE with the pre-tokenizers of most models and caches words: it takes half to a hundredth of the time.
Two libraries can read one tokenizer file differently, hence three precautions. At the start, both encode a text with
everything that tokenizers are known to differ on, and the ids are compared. Texts with characters on which the two
were seen to differ go to `tokenizers`, and so do texts on which `fastokens` fails.
"""

import fastokens
import numpy as np
import structlog
import tokenizers

# The libraries' regular expressions disagree on whether the long s is an s where case does not count, and on whether
# Mongolian's vowel separator is white space.
_SEEN_TO_DIFFER = ("\u017f", "\u180e")

_PROBE = (
    "It's WE'LL they'd I'M naïve STRASSE straße camelCase snake_case 3.14159 1,234,567 v2.0 x=y==z!=w->{}[]();//#$%&\n"
    "  two  spaces\t\ttabs \n\n\n lines\r\n\r\nof both   kinds "
    "\u00a0\u2003\u3000 wide\u200b\u200d\ufeff none\x00\x07\x7f\x85"
    "Ελλάδα Привет עברית العربية ٣٤ हिन्दी ไทย ქართული 한국어 日本語、漢字。 e\u0301 \u1100\u1161\u11a8 ﬁ Å ½ ² Ⅷ ǅ 𝔘 𐍈 "
    "🙂👩‍👩‍👧🏽🇩🇪 \ue000\U0010fffd\u0378 “quoted” ‘so’ — …  "
)

log = structlog.get_logger()


class FastEncoder:
    """Encodes as `reference` does, in less time."""

    def __init__(self, fast: fastokens.Tokenizer, reference: tokenizers.Tokenizer) -> None:
        self._fast = fast
        self._reference = reference

    def encode(self, text: str, *, add_special_tokens: bool) -> np.ndarray:
        """Returns token ids, int32[n], read-only. Releases the interpreter lock."""
        if not any(char in text for char in _SEEN_TO_DIFFER):
            try:
                return self._encode_fast(text, add_special_tokens)
            except ValueError as error:  # a pattern that takes too long on this text
                log.info("text left to the slower tokenizer", reason=str(error), chars=len(text))
        return encode_with(self._reference, text, add_special_tokens=add_special_tokens)

    def agrees(self) -> bool:
        """True when both libraries give the same ids for a text with much that is unusual and all added tokens."""
        text = probe_of(self._reference)
        return all(
            np.array_equal(
                self._encode_fast(text, special), encode_with(self._reference, text, add_special_tokens=special)
            )
            for special in (False, True)
        )

    def _encode_fast(self, text: str, add_special_tokens: bool) -> np.ndarray:
        ids, _ = self._fast.encode_batch_flat([text], add_special_tokens=add_special_tokens)
        return np.frombuffer(ids, np.dtype("<i4"))


def probe_of(reference: tokenizers.Tokenizer) -> str:
    """Returns a text with much that is unusual and all added tokens."""
    added = [token.content for token in reference.get_added_tokens_decoder().values()]
    return _PROBE + "".join(f"{token} a{token}\n" for token in added) + _PROBE


def encode_with(reference: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> np.ndarray:
    """Returns token ids by the library `tokenizers`, int32[n]."""
    # Unlike `encode`, this releases the interpreter lock, and leaves out the offsets: a third of the time.
    (encoding,) = reference.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return np.array(encoding.ids, np.int32)


def make_fast_encoder(reference: tokenizers.Tokenizer) -> FastEncoder | None:
    """Returns an encoder; None: `fastokens` lacks a part of this tokenizer, or gives other ids."""
    try:
        encoder = FastEncoder(fastokens.Tokenizer.from_json_str(reference.to_str()), reference)
        why_not = "" if encoder.agrees() else "it gives other tokens"
    except ValueError as error:
        why_not = str(error)
    if not why_not:
        return encoder
    log.info("fastokens does not do for this model; tokenizing takes longer", reason=why_not)
    return None
