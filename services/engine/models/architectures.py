"""The architectures that there are: what config.json says of each, and the tensors that it must have.

Nothing here needs torch: what cannot be served is refused before any process starts that computes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from services.engine.models.decoder_settings import decoder_shapes, decoder_shares, parse_decoder_config
from services.engine.models.encoder_families import ENCODERS
from services.engine.models.encoder_tensors import encoder_shares
from services.engine.models.families import FAMILIES
from services.engine.models.model_config import ModelConfig, Shard, layers_of_stages
from services.engine.models.opt_config import opt_shapes, opt_shares, parse_opt_config
from services.engine.models.quantized.read import read_scheme
from services.engine.models.settings import ConfigSettings
from services.engine.models.shapes import OF_LAYER, Shapes, Share, Shares
from services.protocol.model_files.base import ModelError, Settings

# Returns the bits of a number of a matrix in codes, scales with it, by its name and inputs; None: it stays in numbers.
CodeBits = Callable[[str, int], float | None]


@dataclass(frozen=True, slots=True)
class Ends:
    """The tensors before a model's layers and behind them, by how their names begin: those that the first stage alone
    needs, and those that the last one alone needs. Both need the embedding of a tied model.
    """

    embedding: str
    first: tuple[str, ...] = ()  # beside the embedding
    last: tuple[str, ...] = ("lm_head.",)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One kind of model, as its files describe it. model_type: its name in config.json's setting of that name. `parse`
    makes the config that `shapes` and `shares` take.
    """

    model_type: str
    parse: Callable[[ConfigSettings, str], ModelConfig]
    shapes: Callable[[Any], Shapes]  # of a whole model's tensors
    shares: Callable[[Any, Shard], Shares]  # of these, for one rank
    ends: Ends | None = None  # None: stages cannot share such a model


_DECODER_ENDS = Ends("model.embed_tokens.")
_OPT_ENDS = Ends(
    "model.decoder.embed_tokens.",
    first=("model.decoder.embed_positions.", "model.decoder.project_in."),
    last=("model.decoder.final_layer_norm.", "model.decoder.project_out.", "lm_head."),
)

SHAPES = {
    **{
        name: ModelShape(family.model_type, parse_decoder_config, decoder_shapes, decoder_shares, _DECODER_ENDS)
        for name, family in FAMILIES.items()
    },
    "OPTForCausalLM": ModelShape("opt", parse_opt_config, opt_shapes, opt_shares, _OPT_ENDS),
    **{
        name: ModelShape(family.model_type, family.parse, family.shapes, encoder_shares)
        for name, family in ENCODERS.items()
    },
}


def parse_model_config(values: Settings) -> ModelConfig:
    """Returns the shape that config.json's values describe. Raises ModelError, for a setting too that nobody reads."""
    config, refused = read_model_config(values)
    for error in refused:
        raise error
    return config


def read_model_config(values: Settings) -> tuple[ModelConfig, list[ModelError]]:
    """Returns the shape that config.json's values describe, and the errors of the settings that nobody reads. A model
    with such settings must be refused. Raises ModelError for what cannot be read as a shape.
    """
    raw = ConfigSettings(values)
    names = raw.texts("architectures")
    if len(names) != 1:
        raise ModelError(f"config.json: architectures is {names!r}, a list with one name was expected")
    if names[0] not in SHAPES:
        raise raw.refusal("architectures", f"is not supported (supported: {', '.join(SHAPES)})")
    architecture = SHAPES[names[0]]
    if (model_type := raw.text("model_type")) not in (None, architecture.model_type):
        raise ModelError(f"config.json: model_type {model_type!r} contradicts architectures, which names {names[0]}")
    scheme = read_scheme(raw)
    config = architecture.parse(raw, names[0])
    return config if scheme is None else replace(config, scheme=scheme), list(raw.unread())


def shapes_of(config: ModelConfig) -> Shapes:
    """Returns the shapes of all tensors that a checkpoint of this model must have. They are the whole model's."""
    return SHAPES[config.architecture].shapes(config.whole)


def shares_of(config: ModelConfig) -> Shares:
    """Returns the shares of the tensors that a rank reads; none, if the model is whole."""
    shard = config.sharded
    if shard is None:
        return {}
    shares = SHAPES[config.architecture].shares(config.whole, shard) if shard.size > 1 else {}
    return shares if shard.layers is None else shares | dict.fromkeys(_of_other_stages(config))


def _of_other_stages(config: ModelConfig) -> Iterator[str]:
    """Yields the names of the tensors that this stage does not need."""
    ends, layers, is_tied = SHAPES[config.architecture].ends, config.stage.layers, config.tie_word_embeddings
    assert ends is not None, "stages cannot share this model"
    for name in shapes_of(config):
        if (found := OF_LAYER.search(name)) is not None:
            is_needed = int(found[1]) in layers
        elif name.startswith(ends.embedding):
            is_needed = config.stage.is_first or (is_tied and config.stage.is_last)
        elif name.startswith(ends.first):
            is_needed = config.stage.is_first
        else:
            is_needed = config.stage.is_last or not name.startswith(ends.last)
        if not is_needed:
            yield name


def check_stages(config: ModelConfig, num_stages: int) -> None:
    """Raises ModelError for a model whose layers so many stages cannot share."""
    if not config.generates or SHAPES[config.architecture].ends is None:
        raise ModelError(f"{num_stages} stages cannot share a model that makes embeddings or scores alone")
    layers_of_stages(config.num_layers, num_stages)


def num_parameters(config: ModelConfig) -> int:
    """Returns how many numbers of a checkpoint of this shape are read: all of them, or a rank's."""
    shares = shares_of(config)
    return sum(_num_read(shape, shares.get(name, Share())) for name, shape in shapes_of(config).items())


def weight_bytes(config: ModelConfig, item_bytes: int, code_bits: CodeBits | None = None) -> int:
    """Returns the memory of the tensors that are read, `item_bytes` for each number that is not kept in codes."""
    shares, total = shares_of(config), 0
    for name, shape in shapes_of(config).items():
        count = _num_read(shape, shares.get(name, Share()))
        bits = code_bits(name, shape[1]) if code_bits is not None and len(shape) > 1 else None
        total += count * item_bytes if bits is None else int(count * bits / 8)
    return total


def _num_read(shape: tuple[int, ...], share: Share | None) -> int:
    if share is None:
        return 0
    rows = shape[0] if share.rows is None else sum(len(range(shape[0])[one]) for one in share.rows)
    others = shape[1:] if share.columns is None else (len(range(shape[1])[share.columns]), *shape[2:])
    return rows * math.prod(others)
