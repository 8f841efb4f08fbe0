"""The architectures of encoders: how each reads its config.json, and which tensors it has."""

from collections.abc import Callable
from dataclasses import dataclass

from services.engine.models.encoder_config import (
    EncoderConfig,
    parse_bert_classifier,
    parse_bert_config,
    parse_modernbert_classifier,
    parse_modernbert_config,
    parse_roberta_classifier,
    parse_roberta_config,
)
from services.engine.models.encoder_tensors import (
    bert_classifier_shapes,
    bert_shapes,
    modernbert_classifier_shapes,
    modernbert_shapes,
)
from services.engine.models.settings import ConfigSettings
from services.engine.models.shapes import Shapes


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """One architecture of encoders."""

    model_type: str
    parse: Callable[[ConfigSettings, str], EncoderConfig]
    shapes: Callable[[EncoderConfig], Shapes]


ENCODERS = {
    "BertModel": EncoderFamily("bert", parse_bert_config, bert_shapes),
    "RobertaModel": EncoderFamily("roberta", parse_roberta_config, bert_shapes),
    "XLMRobertaModel": EncoderFamily("xlm-roberta", parse_roberta_config, bert_shapes),
    "ModernBertModel": EncoderFamily("modernbert", parse_modernbert_config, modernbert_shapes),
    "BertForSequenceClassification": EncoderFamily("bert", parse_bert_classifier, bert_classifier_shapes),
    "RobertaForSequenceClassification": EncoderFamily("roberta", parse_roberta_classifier, bert_classifier_shapes),
    "XLMRobertaForSequenceClassification": EncoderFamily(
        "xlm-roberta", parse_roberta_classifier, bert_classifier_shapes
    ),
    "ModernBertForSequenceClassification": EncoderFamily(
        "modernbert", parse_modernbert_classifier, modernbert_classifier_shapes
    ),
}
