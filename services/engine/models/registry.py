"""From a model directory to a model that runs: which architectures there are, and the four steps that each has."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.engine.attention.base import Attention
from services.engine.kernels.base import Operations
from services.engine.models.base import Model, ModelConfig, Weights
from services.engine.models.checkpoint import Checkpoint
from services.engine.models.config import FAMILIES, parse_decoder_config
from services.engine.models.decoder import Decoder
from services.engine.models.opt import Opt, load_opt, opt_shapes, parse_opt_config
from services.engine.models.settings import Settings
from services.engine.models.tensors import Shapes, Tensors, check_tensors
from services.engine.models.weights import decoder_shapes, load_decoder
from services.protocol.model_dir import ModelError


@dataclass(frozen=True, slots=True)
class Architecture:
    """One kind of model. The config that `parse` makes is what the others take."""

    parse: Callable[[Settings, str], ModelConfig]
    shapes: Callable[[Any], Shapes]
    load: Callable[[Tensors, Any], Weights]
    model: Callable[[Any, Any, Attention[Any], Operations], Model]


_DECODER = Architecture(parse_decoder_config, decoder_shapes, load_decoder, Decoder)

ARCHITECTURES = {
    **dict.fromkeys(FAMILIES, _DECODER),
    "OPTForCausalLM": Architecture(parse_opt_config, opt_shapes, load_opt, Opt),
}


def parse_model_config(raw: Settings) -> ModelConfig:
    """The shape that config.json's values describe. Raises ModelError."""
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ModelError(f"config.json: architectures is {names!r}, a list with one name was expected")
    if names[0] not in ARCHITECTURES:
        raise ModelError(f"architecture {names[0]} is not supported (supported: {', '.join(ARCHITECTURES)})")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"config.json: quantization_config is not supported (quant_method {method!r})")
    return ARCHITECTURES[names[0]].parse(raw, names[0])


def num_parameters(config: ModelConfig) -> int:
    """How many numbers a checkpoint of this shape holds."""
    shapes = ARCHITECTURES[config.architecture].shapes(config)
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def load_weights(directory: Path, config: ModelConfig, dtype: torch.dtype, *, fused: bool) -> Weights:
    """Reads a checkpoint, for fused kernels or for torch's operations alone.

    Raises ModelError, before reading, for anything missing, misshapen or unexpected.
    """
    architecture = ARCHITECTURES[config.architecture]
    with Checkpoint(directory) as checkpoint:
        check_tensors(checkpoint, config, architecture.shapes(config))
        return architecture.load(Tensors(checkpoint, dtype, fused=fused), config)


def make_model(config: ModelConfig, weights: Weights, attention: Attention[Any], operations: Operations) -> Model:
    """The model over a pool of KV blocks."""
    return ARCHITECTURES[config.architecture].model(config, weights, attention, operations)


def stored_dtype(directory: Path) -> torch.dtype:
    """The dtype of the checkpoint's embedding, for a config.json that does not say. Raises ModelError."""
    with Checkpoint(directory) as checkpoint:
        name = next((name for name in checkpoint.names if name.endswith("embed_tokens.weight")), None)
        if name is None:
            raise ModelError(f"{directory}: the checkpoint has no embed_tokens.weight")
        return checkpoint.dtype(name)
