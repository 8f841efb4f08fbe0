"""The shapes of encoders, read from a Hugging Face config.json.

BERT (Devlin et al. 2018, arXiv 1810.04805), RoBERTa (Liu et al. 2019, arXiv 1907.11692), XLM-RoBERTa (Conneau et al.
2019, arXiv 1911.02116) and ModernBERT (Warner et al. 2024, arXiv 2412.13663). Every token sees all tokens of its row,
or in some layers of ModernBERT those that are near. No token is generated, so nothing of a row is kept.
"""

from dataclasses import dataclass, replace

from services.engine.models.label_settings import read_num_labels
from services.engine.models.model_config import ModelConfig, read_dtype
from services.engine.models.rope_config import Rope
from services.engine.models.settings import ConfigSettings
from services.protocol.model_files.base import ModelError

# Names of functions between the two products of an MLP, as config.json has them.
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """All that an encoder's computation depends on, weights aside."""

    is_causal: bool = False
    activation: str
    norm_eps: float
    reaches: tuple[int | None, ...]  # of each layer: a token sees those at most so far from it; None: all
    # BERT's alone, and those of its kind.
    num_positions: int = 0  # rows of the positions' embedding; 0: positions are rotary
    num_token_types: int = 0
    first_position: int = 0  # row of a row's first token
    padding_id: int | None = None  # a token whose position is the row before the first one; None: none is special
    # Cross encoders' alone.
    prefix: str = "model."  # of the names of the encoder's tensors
    head_names: tuple[str, str] = ("", "")  # of the tensors of the head's products, the first and the second one
    head_bias: bool = True  # of the first
    head_activation: str = "tanh"  # after it
    # ModernBERT's alone.
    local_rope: Rope | None = None  # of layers with a reach; `rope` is that of the others
    norm_bias: bool = True
    attention_bias: bool = True
    mlp_bias: bool = True

    @property
    def has_token_types(self) -> bool:
        """Returns True if the model tells the tokens of two texts apart."""
        return self.num_token_types > 1

    @property
    def attention_reaches(self) -> tuple[int | None, ...]:
        """Returns the reach of each layer."""
        return self.reaches

    @property
    def is_modern(self) -> bool:
        """Returns True for norms before attention and MLP, rotary positions, and a gated MLP."""
        return self.local_rope is not None


# Settings of ModernBERT's that mean nothing for hidden states: of other heads, of training, of how it is computed.
_TRAINING_AND_OTHER_HEADS = (
    "classifier_bias",
    "classifier_pooling",
    "decoder_bias",
    "deterministic_flash_attn",
    "embedding_dropout",
    "initializer_cutoff_factor",
    "mlp_dropout",
    "position_embedding_type",  # published files have "absolute", and positions are rotary whatever it says
    "reference_compile",
    "repad_logits_with_grad",
    "sparse_pred_ignore_index",
    "sparse_prediction",
)


def parse_bert_config(raw: ConfigSettings, architecture: str) -> EncoderConfig:
    """Returns the shape that the config.json of BERT describes. Raises ModelError."""
    positions = raw.integer("max_position_embeddings", 512)
    return _parse(raw, architecture, positions, max_position_embeddings=positions)


def parse_roberta_config(raw: ConfigSettings, architecture: str) -> EncoderConfig:
    """Returns the shape that the config.json of RoBERTa or XLM-RoBERTa describes. Raises ModelError."""
    positions, padding_id = raw.integer("max_position_embeddings", 512), raw.integer("pad_token_id", 1, least=0)
    first = padding_id + 1
    if positions <= first:
        raise raw.refusal("max_position_embeddings", f"leaves no positions: the first is {first}")
    return _parse(
        raw,
        architecture,
        positions,
        max_position_embeddings=positions - first,
        first_position=first,
        padding_id=padding_id,
    )


def parse_modernbert_config(raw: ConfigSettings, architecture: str) -> EncoderConfig:
    """Returns the shape that the config.json of ModernBERT describes. Raises ModelError."""
    hidden_size, num_heads = _heads(raw)
    if (hidden_size // num_heads) % 2:
        raise raw.refusal("num_attention_heads", "makes heads of an odd size, which the rotary embedding cannot have")
    raw.disregard(*_TRAINING_AND_OTHER_HEADS)
    eps = raw.number("norm_eps", 1e-5)
    if raw.number("layer_norm_eps", eps) != eps:
        raise raw.refusal("layer_norm_eps", f"contradicts norm_eps, {eps}")
    num_layers = raw.integer("num_hidden_layers", 22)
    reach = raw.integer("local_attention", 128) // 2
    global_rope, local_rope = _ropes(raw)
    return EncoderConfig(
        architecture=architecture,
        vocab_size=raw.integer("vocab_size", 50368),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("intermediate_size", 1152),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=raw.integer("max_position_embeddings", 8192),
        rope=global_rope,
        window=None,
        tie_word_embeddings=False,
        dtype=read_dtype(raw),
        activation=_activation(raw, "hidden_activation"),
        norm_eps=eps,
        reaches=tuple(reach if is_local else None for is_local in _local_layers(raw, num_layers)),
        local_rope=local_rope,
        norm_bias=raw.flag("norm_bias"),
        attention_bias=raw.flag("attention_bias"),
        mlp_bias=raw.flag("mlp_bias"),
    )


def parse_bert_classifier(raw: ConfigSettings, architecture: str) -> EncoderConfig:
    """Returns the shape of a cross encoder that the config.json of BERT describes. Its head begins with the pooler.
    Raises ModelError.
    """
    return replace(
        parse_bert_config(raw, architecture),
        num_labels=read_num_labels(raw),
        prefix="model.bert.",
        head_names=("model.bert.pooler.dense", "model.classifier"),
    )


def parse_roberta_classifier(raw: ConfigSettings, architecture: str) -> EncoderConfig:
    """Returns the shape of a cross encoder that the config.json of RoBERTa's kind describes. Raises ModelError."""
    return replace(
        parse_roberta_config(raw, architecture),
        num_labels=read_num_labels(raw),
        prefix="model.roberta.",
        head_names=("model.classifier.dense", "model.classifier.out_proj"),
    )


def parse_modernbert_classifier(raw: ConfigSettings, architecture: str) -> EncoderConfig:
    """Returns the shape of a cross encoder that the config.json of ModernBERT describes. Raises ModelError."""
    return replace(
        parse_modernbert_config(raw, architecture),
        num_labels=read_num_labels(raw),
        head_names=("head.dense", "classifier"),
        head_bias=raw.flag("classifier_bias"),
        head_activation=_activation(raw, "classifier_activation"),
    )


def _parse(
    raw: ConfigSettings,
    architecture: str,
    num_positions: int,
    *,
    max_position_embeddings: int,
    first_position: int = 0,
    padding_id: int | None = None,
) -> EncoderConfig:
    hidden_size, num_heads = _heads(raw)
    raw.require("position_embedding_type", "absolute")
    raw.require("is_decoder", False)
    num_layers = raw.integer("num_hidden_layers", 12)
    return EncoderConfig(
        architecture=architecture,
        vocab_size=raw.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=raw.integer("intermediate_size", 3072),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=max_position_embeddings,
        rope=None,
        window=None,
        tie_word_embeddings=False,
        dtype=read_dtype(raw),
        activation=_activation(raw, "hidden_act"),
        norm_eps=raw.number("layer_norm_eps", 1e-12),
        reaches=(None,) * num_layers,
        num_positions=num_positions,
        num_token_types=raw.integer("type_vocab_size", 2),
        first_position=first_position,
        padding_id=padding_id,
    )


def _heads(raw: ConfigSettings) -> tuple[int, int]:
    hidden_size, num_heads = raw.integer("hidden_size", 768), raw.integer("num_attention_heads", 12)
    if hidden_size % num_heads:
        raise raw.refusal("num_attention_heads", f"cannot share a hidden_size of {hidden_size} evenly")
    raw.require("is_causal", False)
    raw.disregard("tie_word_embeddings", "output_past")  # no logits are computed, and no KV is returned
    return hidden_size, num_heads


def _activation(raw: ConfigSettings, key: str) -> str:
    name = raw.text(key, "gelu") or "gelu"
    if name not in ACTIVATIONS:
        raise raw.refusal(key, f"is not supported (supported: {', '.join(ACTIVATIONS)})")
    return name


def _local_layers(raw: ConfigSettings, num_layers: int) -> list[bool]:
    """Returns which layers see near tokens alone: by `layer_types`, else all but every n-th."""
    every = raw.integer("global_attn_every_n_layers", 3)
    kinds = raw.texts("layer_types")
    if not kinds:
        return [bool(layer % every) for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise ModelError(f"config.json: layer_types has {len(kinds)} kinds, but num_hidden_layers is {num_layers}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"config.json: layer_types with {kind!r} is not supported")
    return [kind == "sliding_attention" for kind in kinds]


def _ropes(raw: ConfigSettings) -> tuple[Rope, Rope]:
    """Returns the rotary embeddings of layers that see all tokens, and of those that see near ones."""
    if raw.section("rope_scaling"):
        raise raw.refusal("rope_scaling", "is not supported for this architecture")
    parameters = raw.section("rope_parameters")
    older = raw.number("global_rope_theta", 160_000.0), raw.number("local_rope_theta", 10_000.0)
    ropes = []
    for kind, theta in zip(("full_attention", "sliding_attention"), older, strict=True):
        section = parameters.section(kind)
        section.require("rope_type", "default")
        ropes.append(Rope(section.number("rope_theta", theta)))
    return ropes[0], ropes[1]
