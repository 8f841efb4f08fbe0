"""Cross encoders: models that read a pair of texts at once and give it one number, by their config.json."""

from dataclasses import dataclass

from services.config import Pooling
from services.protocol.model_files.base import ModelError, Settings

_ARCHITECTURES = "ForSequenceClassification"  # the end of their names
_ACTIVATIONS = {"Sigmoid": True, "Identity": False}  # by the ends of torch's names


@dataclass(frozen=True, slots=True)
class CrossEncoder:
    """The way from a pair's tokens to its score. pooling: what the head reads. sigmoid: maps its number to 0 to 1."""

    pooling: Pooling
    sigmoid: bool


def read_cross_encoder(config: Settings) -> CrossEncoder | None:
    """Returns what config.json says; None: the model is no cross encoder. Raises ModelError.

    A number becomes a score by the sigmoid, as in sentence-transformers, unless the model names another function.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not any(str(name).endswith(_ARCHITECTURES) for name in names):
        return None
    pooling = config.get("classifier_pooling", Pooling.CLS.value) if config.get("model_type") == "modernbert" else "cls"
    if pooling not in (Pooling.CLS.value, Pooling.MEAN.value):
        raise ModelError(f"config.json: classifier_pooling {pooling!r} is not supported (cls and mean are)")
    section = config.get("sentence_transformers")
    newer = section.get("activation_fn") if isinstance(section, dict) else None
    named = newer or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(named).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise ModelError(f"config.json: the activation {named} is not supported (Sigmoid and Identity are)")
    return CrossEncoder(Pooling(pooling), _ACTIVATIONS[kind])
