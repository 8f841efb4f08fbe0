"""Variants of config.json with one setting changed or left out: Baton computes what `transformers` does, or refuses.

The settings are those of the configuration classes of `transformers`, so that a new version brings its own, and those
of `INTERESTING`. A variant is refused by name; where a shape no longer fits the weights, the tensor is named.

    python -m tests.engine.models.variants
"""

import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, GenerationConfig

from services.config import DeviceKind, Dtype, Pooling
from services.config.engine import EngineConfig
from services.engine.engine import Engine
from services.engine.models.architectures import parse_model_config
from services.engine.models.model_config import ModelConfig
from services.engine.runner.load import load_runner
from services.engine.schedulers.prefill import PrefillScheduler
from services.protocol.model_files.base import ModelError, Settings, read_json_object
from tests.checkpoints import ENCODERS, FAMILIES, LLAMA3_ROPE, YARN_ROPE, write_checkpoint
from tests.engine.harness import Driven
from tests.engine.oracle import Reference, prompts_of
from tests.engine.stepping import run_greedy

_PROMPT, _NUM_TOKENS, _TOLERANCE = 40, 6, 1e-4  # tokens, tokens, log-probabilities
_VOCAB = 320  # of the checkpoints
_SHAPES = {  # settings that the tensors are shaped by
    "ffn_dim", "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "vocab_size", "word_embed_proj_dim", "attention_bias", "mlp_bias",
    "qkv_bias", "num_experts", "num_local_experts", "moe_intermediate_size", "shared_expert_intermediate_size",
    "decoder_sparse_step", "mlp_only_layers", "enable_bias", "_remove_final_layer_norm", "do_layer_norm_before",
    "layer_norm_elementwise_affine", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "first_k_dense_replace", "n_routed_experts", "n_shared_experts", "type_vocab_size", "norm_bias",
}  # fmt: skip
_SET = {  # values of settings whose default says nothing of their type
    "architectures": ["GPT2LMHeadModel"],
    "bos_token_id": 5,
    "classifier_dropout": 0.5,
    "classifier_pooling": "mean",
    "dtype": "float16",
    "id2label": {"0": "no"},
    "label2id": {"no": 0},
    "layer_types": ["sliding_attention"] * 2,
    "n_group": 3,
    "pad_token_id": 5,
    "problem_type": "regression",
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    "sliding_window": 7,
    "topk_group": 3,
    "transformers_version": "4.30.0",
}
ALL = FAMILIES | ENCODERS
_CHECKPOINTS: dict[str, dict[str, Any]] = {"modernbert": {"local_attention": 16}}  # what a prompt is long enough for
LEFT_OUT = object()  # in place of a value: the setting is not in config.json
_NOT_RUN = {"return_dict": "`transformers` itself cannot generate with it"}
_NOT_RUN_OF = {("ministral", "head_dim"): "`transformers` needs it, though its configuration does not"}
# Settings that `transformers` itself cannot do without, by the family.
_NEEDED = {"modernbert": ("pad_token_id", "sliding_window")}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {**YARN_ROPE, "original_max_position_embeddings": 16}
# Settings that the classes do not name but heed, that older versions or other programs know, or that contradict others.
INTERESTING: tuple[tuple[str, Any], ...] = (
    ("q_lora_rank", None),
    ("rope_interleave", False),
    ("scoring_func", "softmax"),
    ("scoring_func", "sigmoid"),
    ("topk_method", "noaux_tc"),
    ("moe_layer_freq", 2),
    ("first_k_dense_replace", 2),
    ("num_nextn_predict_layers", 0),
    ("qk_head_dim", 32),
    ("is_causal", False),
    ("is_causal", None),
    ("is_causal", True),
    ("is_decoder", True),
    ("add_cross_attention", True),
    ("per_layer_config", {"1": {"rms_norm_eps": 0.1, "attention_dropout": 0.5}}),
    ("attention_chunk_size", 8),
    ("attn_implementation", "eager"),
    ("tie_encoder_decoder", True),
    ("tie_word_embeddings", True),
    ("model_type", "gpt2"),
    ("torch_dtype", "bfloat16"),
    ("quantization_config", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    ("compression_config", {"format": "dense"}),
    ("text_config", {"num_hidden_layers": 1}),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("bias", True),
    ("hidden_act", "gelu"),
    ("hidden_activation", "gelu"),
    ("rms_norm_eps", 0.5),
    ("layer_norm_eps", 0.5),
    ("head_dim", 32),
    ("sliding_window", 7),
    ("sliding_window", None),
    ("use_sliding_window", True),
    ("max_window_layers", 0),
    ("max_window_layers", 1),
    ("layer_types", ["full_attention"] * 2),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("layer_types", ["full_attention"] * 3),
    ("rope_theta", 500.0),
    ("rope_scaling", None),
    ("rope_scaling", _DEFAULT_ROPE),
    ("rope_scaling", {"type": "linear", "factor": 4.0}),
    ("rope_scaling", {"type": "dynamic", "factor": 4.0}),
    ("rope_scaling", _YARN),
    ("rope_scaling", {"rope_type": "default", "mrope_section": [2, 3, 3]}),
    ("rope_parameters", None),
    ("rope_parameters", {"rope_type": "linear", "factor": 4.0}),
    ("rope_parameters", LLAMA3_ROPE),
    ("rope_parameters", _YARN),
    ("rope_parameters", {**_YARN, "attention_factor": 1.5, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}),
    ("rope_parameters", {**_YARN, "truncate": None}),
    ("rope_parameters", {**_YARN, "mscale": 0.5, "mscale_all_dim": 2.0}),
    ("rope_parameters", {**_YARN, "mscale": 0.5}),
    ("rope_parameters", {**_DEFAULT_ROPE, "factor": 2.0}),
    ("rope_parameters", {**_DEFAULT_ROPE, "partial_rotary_factor": 0.5}),
    ("rope_parameters", {"full_attention": _DEFAULT_ROPE}),
    ("partial_rotary_factor", 0.5),
    ("original_max_position_embeddings", 16),
    ("rope_interleaved", True),
    ("use_mrope", True),
    ("attn_logit_softcapping", 5.0),
    ("final_logit_softcapping", 5.0),
    ("query_pre_attn_scalar", 4),
    ("attention_multiplier", 0.5),
    ("embedding_multiplier", 12.0),
    ("residual_multiplier", 0.2),
    ("logits_scaling", 8.0),
    ("logit_scale", 0.5),
    ("clip_qkv", 0.1),
    ("use_qk_norm", True),
    ("no_rope_layers", [0, 1]),
    ("dual_chunk_attention_config", {"chunk_size": 16}),
    ("num_experts", 4),
    ("num_experts_per_tok", 1),
    ("norm_topk_prob", True),
    ("router_jitter_noise", 0.5),
    ("decoder_sparse_step", 2),
    ("mlp_only_layers", [1]),
    ("swiglu_limit", 7.0),
    ("n_shared_experts", 1),
    ("routed_scaling_factor", 2.0),
    ("transformers.js_config", {"dtype": "q4"}),
    ("unsloth_version", "2025.1"),
    ("auto_map", {"AutoConfig": "other.Config"}),
    ("prefix", "</s>"),
    ("nobody_knows_this", 1),
    ("nobody_knows_this", None),
)


@dataclass(frozen=True)
class Variant:
    """One setting of one family's config.json, and its other value or `LEFT_OUT`."""

    family: str
    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.family}: {self.key} {'left out' if self.value is LEFT_OUT else repr(self.value)}"


def variants_of(family: str) -> list[Variant]:
    """All variants of a family, in one order."""
    values = ALL[family][0]().to_dict() | GenerationConfig._get_default_generation_params()
    names = [key for key in values if key not in ("model_type", *_NOT_RUN) and (family, key) not in _NOT_RUN_OF]
    changed = [(key, _other(key, values[key])) for key in names]
    if (values["pad_token_id"] or 0) >= _VOCAB:  # `transformers` cannot make such an embedding
        values.pop("pad_token_id")
    tried = (*changed, *((key, LEFT_OUT) for key in names if key in values), *INTERESTING)
    needed = _NEEDED.get(family, ())
    return [Variant(family, key, value) for key, value in tried if key not in needed or value not in (None, LEFT_OUT)]


def _other(key: str, value: Any) -> Any:
    """Another value than the default, of its type."""
    if key in _SET:
        return _SET[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value or type(value)(1)
    return [3] if value is None else f"{value}_new"


@dataclass
class Tried:
    """A family's checkpoint, against which variants are tried."""

    directory: Path
    family: str
    _base: Settings = field(init=False)
    _own: dict[ModelConfig, tuple[list[int], list[float]]] = field(default_factory=dict)  # its results

    def __post_init__(self) -> None:
        shape = _CHECKPOINTS.get(self.family, {})
        write_checkpoint(self.directory, self.family, max_position_embeddings=128, **shape)
        self._base = read_json_object(self.directory / "config.json")

    def check(self, variant: Variant) -> str:
        """Returns "equal" or the refusal. Raises AssertionError for everything else."""
        config = self._base | {variant.key: variant.value}
        if variant.value is LEFT_OUT:
            del config[variant.key]
        (self.directory / "config.json").write_text(json.dumps(config))
        tokens, logprobs, refusal = self._run(config)
        if refusal is not None:
            is_named = variant.key in refusal or (variant.key in _SHAPES and "tensor " in refusal)
            assert is_named, f"{variant} is refused without its name: {refusal}"
            return refusal
        if not parse_model_config(config).is_causal:
            self._check_states(variant, torch.tensor(logprobs))
            return "equal"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of older names of settings
            expected_tokens, expected = Reference(self.directory).run(_PROMPT_TOKENS, _NUM_TOKENS)
        found = torch.tensor(logprobs)
        wanted = expected[torch.arange(_NUM_TOKENS), torch.tensor(expected_tokens)]
        assert tokens == expected_tokens, f"{variant}: other tokens than those of transformers"
        assert torch.allclose(found, wanted, rtol=0, atol=_TOLERANCE), f"{variant}: {found} instead of {wanted}"
        return "equal"

    def _check_states(self, variant: Variant, found: torch.Tensor) -> None:
        """Raises AssertionError for another mean of hidden states than that of `transformers`."""
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore", FutureWarning)
            # With its other ways to compute attention `transformers` ignores `is_causal`.
            chosen: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
            model = AutoModel.from_pretrained(self.directory, **chosen)
            states: torch.Tensor = model(torch.tensor([_PROMPT_TOKENS]), return_dict=True).last_hidden_state[0]
        wanted = states.mean(dim=0)
        assert torch.allclose(found, wanted, rtol=0, atol=_TOLERANCE), f"{variant}: {found} instead of {wanted}"

    def _run(self, config: Settings) -> tuple[list[int], list[float], str | None]:
        """The greedy tokens, their log-probabilities, and the refusal if there is one; once for each `ModelConfig`.

        Of a model that makes embeddings alone there are no tokens, and the mean of its hidden states.
        """
        try:
            parsed = parse_model_config(config)
            if parsed not in self._own:
                self._own[parsed] = self._loaded_and_run() if parsed.is_causal else ([], self._loaded_and_pooled())
        except ModelError as error:
            return [], [], str(error)
        return (*self._own[parsed], None)

    def _loaded_and_pooled(self) -> list[float]:
        chosen = EngineConfig(model=self.directory, device=DeviceKind.CPU, dtype=Dtype.FLOAT32, num_threads=1)
        engine = Engine(
            load_runner(chosen).runner, PrefillScheduler(256), max_num_seqs=1, max_model_len=128, eos_token_ids=()
        )
        driven = Driven(engine)
        handle = driven.embed(_PROMPT_TOKENS, Pooling.MEAN)
        driven.run()
        pooled: list[float] = driven.embeddings[handle].tolist()
        return pooled

    def _loaded_and_run(self) -> tuple[list[int], list[float]]:
        chosen = EngineConfig(
            model=self.directory, device=DeviceKind.CPU, dtype=Dtype.FLOAT32, kv_memory_bytes=1 << 20, num_threads=1
        )
        (row,) = run_greedy(load_runner(chosen).runner, [_PROMPT_TOKENS], _NUM_TOKENS, chunk=64, num_logprobs=0)
        return row.generated, [sampled for sampled, _, _ in row.logprobs]


(_PROMPT_TOKENS,) = prompts_of([_PROMPT])


def _failures(family: str, directory: Path) -> Iterator[str]:
    tried = Tried(directory, family)
    for variant in variants_of(family):
        try:
            print(f"{variant}: {tried.check(variant)}", flush=True)
        except Exception:
            yield f"{variant}\n{traceback.format_exc()}"


def main() -> int:
    """Tries all variants; prints each, and those that fail once more."""
    with tempfile.TemporaryDirectory() as directory:
        failed = [text for family in ALL for text in _failures(family, Path(directory) / family)]
    print("\n".join(failed))
    print(f"{sum(len(variants_of(family)) for family in ALL)} variants: {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
