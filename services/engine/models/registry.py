"""The architectures, and the steps that each takes from the files of a model to a model that runs."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from services.engine.attention.base import Attention
from services.engine.attention.latent_base import AnyLatentAttention
from services.engine.kernels.base import Operations
from services.engine.models.architectures import shapes_of, shares_of
from services.engine.models.base import Model, Weights
from services.engine.models.checkpoint import Checkpoint
from services.engine.models.decoder import Decoder
from services.engine.models.dummy import DummyTensors
from services.engine.models.encoder import Encoder, load_bert, load_modernbert
from services.engine.models.expert_tensors import DEEPSEEK, GPT_OSS, MIXTRAL, QWEN
from services.engine.models.experts import load_experts
from services.engine.models.families import FAMILIES
from services.engine.models.gguf_stored import gguf_weights
from services.engine.models.gguf_tensors import GgufTensors
from services.engine.models.latent_attention import load_latent_attention
from services.engine.models.latent_decoder import LatentDecoder
from services.engine.models.makers import Makers
from services.engine.models.model_config import ModelConfig
from services.engine.models.opt import Opt, load_opt
from services.engine.models.parts import load_attention, load_gated_mlp
from services.engine.models.quantized.tensors import QuantizedTensors
from services.engine.models.stage_tensors import StageTensors, shares_of_stage
from services.engine.models.tensor_source import TensorSource
from services.engine.models.tensors import Tensors, check_tensors
from services.engine.models.weight_files import WeightFile, safetensors_weights
from services.engine.models.weights import LayerParts, load_decoder
from services.engine.quantization.kept import KeptForms
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.gguf_file import is_gguf

_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "tok_embeddings.weight")  # by their names' ends


@dataclass(frozen=True, slots=True)
class Architecture:
    """One kind of model, as it is loaded and run. Both steps take the config that its `ModelShape` makes."""

    load: Callable[[Tensors, Any], Weights]
    model: Callable[[Any, Any, Any, Operations], Model]  # the third is an `Attention`, or a `LatentAttention`


def latent_decoder(parts: LayerParts) -> Architecture:
    """Returns the architecture of decoders with latent attention whose layers have these parts."""
    return Architecture(partial(load_decoder, parts=parts), LatentDecoder)


def decoder(parts: LayerParts) -> Architecture:
    """Returns the architecture of decoders whose layers have these parts."""
    return Architecture(partial(load_decoder, parts=parts), Decoder)


_DEEPSEEK = LayerParts(attention=load_latent_attention, mlp=partial(load_experts, DEEPSEEK))

ARCHITECTURES = {
    **dict.fromkeys(FAMILIES, decoder(LayerParts())),
    "GptOssForCausalLM": decoder(LayerParts(mlp=partial(load_experts, GPT_OSS))),
    "MixtralForCausalLM": decoder(LayerParts(mlp=partial(load_experts, MIXTRAL))),
    "Qwen2MoeForCausalLM": decoder(LayerParts(mlp=partial(load_experts, QWEN))),
    "Qwen3MoeForCausalLM": decoder(LayerParts(mlp=partial(load_experts, QWEN))),
    "Phi3ForCausalLM": decoder(
        LayerParts(
            attention=partial(load_attention, qkv=("qkv_proj",)), mlp=partial(load_gated_mlp, gate_up=("gate_up_proj",))
        )
    ),
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), latent_decoder(_DEEPSEEK)),
    "OPTForCausalLM": Architecture(load_opt, Opt),
    **dict.fromkeys(
        (
            "BertModel",
            "RobertaModel",
            "XLMRobertaModel",
            "BertForSequenceClassification",
            "RobertaForSequenceClassification",
            "XLMRobertaForSequenceClassification",
        ),
        Architecture(load_bert, Encoder),
    ),
    **dict.fromkeys(("ModernBertModel", "ModernBertForSequenceClassification"), Architecture(load_modernbert, Encoder)),
}


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    fused: bool = False,
    makers: Makers = Makers(),  # noqa: B008 -- frozen
    on_read: Callable[[int], None] = lambda _: None,
    kept: KeptForms | None = None,
) -> Weights:
    """Reads all weights to the source's device; with the configuration of a rank, its share of them, and the norms of
    its layers whole. They are of use once the other ranks are connected (`Weights.ranks`).

    fused: products may be a CPU's kernels. makers: what makes them instead.
    on_read: hears of the bytes of each tensor that was read. kept: hears how codes are kept.
    Raises ModelError, before reading, for any tensor that is missing, misshapen or unexpected.
    """
    architecture = ARCHITECTURES[config.architecture]
    check_tensors(source, config.whole, shapes_of(config))
    shares, layers = shares_of(config), config.stage.layers
    if not config.stage.is_first:
        source, shares = StageTensors(source, layers), shares_of_stage(shares, layers)
    tensors = Tensors(
        source,
        dtype,
        fused=fused,
        makers=makers,
        shares=shares,
        on_read=on_read,
        kept=kept,
    )
    return architecture.load(tensors, config)


def open_tensors(path: Path | None, config: ModelConfig, device: torch.device) -> AbstractContextManager[TensorSource]:
    """Opens the weights of the model at `path`; None: random weights in its stead. Raises ModelError."""
    if path is None:
        return nullcontext(DummyTensors(config, shapes_of(config), device))
    if is_gguf(path):
        return GgufTensors(path, config, device)
    checkpoint = Checkpoint(path, device)
    return checkpoint if config.scheme is None else QuantizedTensors(checkpoint, config.scheme)


def weight_files(path: Path) -> Iterable[WeightFile]:
    """Returns the files with the weights of the model at `path`, for `weights_id`. Raises ModelError."""
    return [gguf_weights(path)] if is_gguf(path) else safetensors_weights(path)


def make_model(
    config: ModelConfig, weights: Weights, attention: Attention[Any] | AnyLatentAttention, operations: Operations
) -> Model:
    """Makes the model over a pool of KV blocks."""
    return ARCHITECTURES[config.architecture].model(config, weights, attention, operations)


def stored_dtype(source: TensorSource) -> torch.dtype:
    """Returns the dtype of the embedding, for a config.json that names none. Raises ModelError."""
    name = next((name for name in source.names if name.endswith(_EMBEDDINGS)), None)
    if name is None:
        raise ModelError(f"the checkpoint has no {_EMBEDDINGS[0]}")
    return source.dtype(name)
