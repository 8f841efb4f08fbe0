"""The architectures, and the four steps that each takes from a model directory to a model that runs."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.engine.attention.base import Attention
from services.engine.kernels.base import Operations
from services.engine.models.base import Model, ModelConfig, Weights
from services.engine.models.checkpoint import Checkpoint, WeightFile, safetensors_weights
from services.engine.models.config import FAMILIES, parse_decoder_config
from services.engine.models.decoder import Decoder
from services.engine.models.dummy import DummyTensors
from services.engine.models.gguf_tensors import GgufTensors, gguf_weights
from services.engine.models.kv_scales import is_kv_only
from services.engine.models.linear import MakeProduct
from services.engine.models.opt import Opt, load_opt, opt_shapes, parse_opt_config
from services.engine.models.settings import ConfigSettings
from services.engine.models.tensor_source import Shapes, TensorSource
from services.engine.models.tensors import Tensors, check_tensors
from services.engine.models.weights import decoder_shapes, load_decoder
from services.protocol.model_files.base import ModelError, Settings
from services.protocol.model_files.gguf_file import is_gguf


@dataclass(frozen=True, slots=True)
class Architecture:
    """One kind of model. model_type: its name in config.json's setting of that name. `parse` makes the config that the
    other steps take.
    """

    model_type: str
    parse: Callable[[ConfigSettings, str], ModelConfig]
    shapes: Callable[[Any], Shapes]
    load: Callable[[Tensors, Any], Weights]
    model: Callable[[Any, Any, Attention[Any], Operations], Model]


ARCHITECTURES = {
    **{
        name: Architecture(family.model_type, parse_decoder_config, decoder_shapes, load_decoder, Decoder)
        for name, family in FAMILIES.items()
    },
    "OPTForCausalLM": Architecture("opt", parse_opt_config, opt_shapes, load_opt, Opt),
}


def parse_model_config(values: Settings) -> ModelConfig:
    """Returns the shape that config.json's values describe. Raises ModelError, for a setting too that nobody reads."""
    raw = ConfigSettings(values)
    names = raw.texts("architectures")
    if len(names) != 1:
        raise ModelError(f"config.json: architectures is {names!r}, a list with one name was expected")
    if names[0] not in ARCHITECTURES:
        raise raw.refusal("architectures", f"is not supported (supported: {', '.join(ARCHITECTURES)})")
    architecture = ARCHITECTURES[names[0]]
    if (model_type := raw.text("model_type")) not in (None, architecture.model_type):
        raise ModelError(f"config.json: model_type {model_type!r} contradicts architectures, which names {names[0]}")
    quantization = raw.section("quantization_config")
    if quantization and not is_kv_only(quantization):
        method = quantization.text("quant_method", "unknown")
        raise ModelError(f"config.json: quantization_config is not supported (quant_method {method!r})")
    config = architecture.parse(raw, names[0])
    raw.refuse_unread()
    return config


def num_parameters(config: ModelConfig) -> int:
    """Returns how many numbers a checkpoint of this shape holds."""
    shapes = ARCHITECTURES[config.architecture].shapes(config)
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    fused: bool = False,
    make_product: MakeProduct | None = None,
) -> Weights:
    """Reads all weights to the source's device.

    fused: products may be a CPU's kernels. make_product: makes the products of all linear layers but the last instead.
    Raises ModelError, before reading, for any tensor that is missing, misshapen or unexpected.
    """
    architecture = ARCHITECTURES[config.architecture]
    check_tensors(source, config, architecture.shapes(config))
    return architecture.load(Tensors(source, dtype, fused=fused, make_product=make_product), config)


def open_tensors(path: Path | None, config: ModelConfig, device: torch.device) -> AbstractContextManager[TensorSource]:
    """Opens the weights of the model at `path`; None: random weights in its stead. Raises ModelError."""
    if path is None:
        return nullcontext(DummyTensors(config, ARCHITECTURES[config.architecture].shapes(config), device))
    return GgufTensors(path, config, device) if is_gguf(path) else Checkpoint(path, device)


def weight_files(path: Path) -> Iterable[WeightFile]:
    """Returns the files with the weights of the model at `path`, for `weights_id`. Raises ModelError."""
    return [gguf_weights(path)] if is_gguf(path) else safetensors_weights(path)


def make_model(config: ModelConfig, weights: Weights, attention: Attention[Any], operations: Operations) -> Model:
    """Makes the model over a pool of KV blocks."""
    return ARCHITECTURES[config.architecture].model(config, weights, attention, operations)


def stored_dtype(source: TensorSource) -> torch.dtype:
    """Returns the dtype of the embedding, for a config.json that names none. Raises ModelError."""
    name = next((name for name in source.names if name.endswith("embed_tokens.weight")), None)
    if name is None:
        raise ModelError("the checkpoint has no embed_tokens.weight")
    return source.dtype(name)
