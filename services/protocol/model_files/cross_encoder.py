"""Cross encoders: models that read a pair of texts at once and give it one number, by their config.json."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from services.config import Pooling
from services.protocol.model_files.base import ModelError, Settings

if TYPE_CHECKING:
    import numpy as np  # `--help` goes without

_ARCHITECTURES = "ForSequenceClassification"  # the end of their names
_DECODERS = frozenset({"llama", "qwen2", "qwen3"})  # by model_type: the last token alone has seen all others
_TYPES = "token_type_ids"  # among a tokenizer's `model_input_names`
_ACTIVATIONS = {"Sigmoid": True, "Identity": False}  # by the ends of torch's names


class PairForm(StrEnum):
    """The forms in which models read a pair of texts."""

    SEGMENTS = "segments"  # as the tokenizer makes pairs, with marks between the texts
    JOINED = "joined"  # one text after the other, as one
    JUDGED = "judged"  # in the prompt of Qwen3-Reranker, which asks for yes or no


@dataclass(frozen=True, slots=True)
class CrossEncoder:
    """The way from a pair to its score. pooling: what the head reads. sigmoid: maps its number to 0 to 1. token_types:
    the model gets the tokenizer's types of tokens, which tell the two texts apart. padding_id: tokens at the end of a
    pair that are this one do not count; None: all count.
    """

    pooling: Pooling
    sigmoid: bool
    token_types: bool = False
    padding_id: int | None = None
    form: PairForm = PairForm.SEGMENTS

    def without_padding(self, token_ids: "np.ndarray") -> "np.ndarray":
        """Returns int32[n] token ids up to the last one that is no padding, and at least one."""
        if self.padding_id is None:
            return token_ids
        others = (token_ids != self.padding_id).nonzero()[0]
        return token_ids[: int(others[-1]) + 1 if len(others) else 1]


def read_cross_encoder(config: Settings, tokenizer_config: Settings) -> CrossEncoder | None:
    """Returns what config.json and tokenizer_config.json say; None: the model is no cross encoder. Raises ModelError.

    A number becomes a score by the sigmoid, as in sentence-transformers, unless the model names another function.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith(_ARCHITECTURES) for name in names):
        return None
    section = config.get("sentence_transformers")
    newer = section.get("activation_fn") if isinstance(section, dict) else None
    named = newer or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(named).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise ModelError(f"config.json: the activation {named} is not supported (Sigmoid and Identity are)")
    is_decoder = config.get("model_type") in _DECODERS
    return CrossEncoder(
        pooling=Pooling.LAST if is_decoder else _encoder_pooling(config),
        sigmoid=_ACTIVATIONS[kind],
        token_types=_has_token_types(config, tokenizer_config),
        padding_id=_padding_id(config) if is_decoder else None,
        form=_form(config),
    )


def _form(config: Settings) -> PairForm:
    if config.get("is_original_qwen3_reranker") is True:
        return PairForm.JUDGED
    return PairForm.JOINED if config.get("use_sep_token") is False else PairForm.SEGMENTS


def _encoder_pooling(config: Settings) -> Pooling:
    pooling = config.get("classifier_pooling", Pooling.CLS.value) if config.get("model_type") == "modernbert" else "cls"
    if pooling not in (Pooling.CLS.value, Pooling.MEAN.value):
        raise ModelError(f"config.json: classifier_pooling {pooling!r} is not supported (cls and mean are)")
    return Pooling(pooling)


def _padding_id(config: Settings) -> int | None:
    found = config.get("pad_token_id")
    if found is not None and (isinstance(found, bool) or not isinstance(found, int)):
        raise ModelError(f"config.json: pad_token_id is {found!r}, an integer was expected")
    return found


def _has_token_types(config: Settings, tokenizer_config: Settings) -> bool:
    """Returns True if the model has types of tokens, and its tokenizer gives them."""
    inputs = tokenizer_config.get("model_input_names")
    gives = not isinstance(inputs, list) or _TYPES in inputs
    return config.get("model_type") == "bert" and config.get("type_vocab_size", 2) != 1 and gives
