"""The labels of a model with a head for scores, read from config.json."""

from services.engine.models.settings import ConfigSettings


def read_num_labels(raw: ConfigSettings) -> int:
    """Returns the number of labels, which must be one: the score of a pair. Raises ModelError."""
    labels = raw.value("id2label")
    number = raw.integer("num_labels", len(labels) if isinstance(labels, dict) else 2)
    if number != 1 or (isinstance(labels, dict) and len(labels) != 1):
        key = "id2label" if isinstance(labels, dict) else "num_labels"
        raise raw.refusal(key, "is not supported: a pair of texts gets one score, by one label")
    disregard_scoring(raw)
    return number


def read_score_tokens(raw: ConfigSettings, architecture: str) -> tuple[str, ...]:
    """Returns the tokens whose logits a score is made of, that for no and that for yes, as vLLM has them in config.json
    for the checkpoints of Qwen3-Reranker; none: the checkpoint has a head. Raises ModelError.
    """
    is_original, tokens = raw.flag("is_original_qwen3_reranker"), raw.texts("classifier_from_token")
    if is_original and architecture != "Qwen3ForSequenceClassification":
        raise raw.refusal("is_original_qwen3_reranker", f"is not supported for {architecture}")
    if is_original != bool(tokens) or (tokens and len(tokens) != 2):
        words = "is not supported (two tokens are, those for no and for yes, beside is_original_qwen3_reranker true)"
        raise raw.refusal("classifier_from_token", words)
    if tokens:
        disregard_scoring(raw)
    return tuple(tokens)


def disregard_scoring(raw: ConfigSettings) -> None:
    """Takes settings as read that say how gateways make pairs and scores, or that losses alone depend on."""
    raw.require("problem_type", raw.text("problem_type"))
    raw.disregard("sbert_ce_default_activation_function", "sentence_transformers", "use_sep_token")
