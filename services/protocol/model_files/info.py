"""Limits, defaults and the identity of a model, for the gateway and the workers."""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from services.config import Pooling
from services.protocol.model_files.base import ModelError, ModelFiles, Settings, naming, require_int
from services.protocol.model_files.cross_encoder import CrossEncoder, read_cross_encoder
from services.protocol.model_files.sentence_modules import read_sentence_modules
from services.protocol.model_files.text_preparation import UNCHANGED, TextPreparation
from services.protocol.sampling import MAX_REPETITION, MAX_TEMPERATURE, MAX_TOP_K, MIN_REPETITION

# The settings of config.json that this module reads. The engine, which refuses settings that nobody reads, knows them
# from here.
CONFIG_KEYS = frozenset({"eos_token_id", "max_position_embeddings", "vocab_size"})
_EMBED_ALONE = ("Model", "ForSequenceClassification")  # ends of names of architectures without a language model's head


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The model's own sampling values, for requests that give none. None: the model has no such value.

    As in vLLM, sampling values of generation_config.json apply whatever `do_sample` is.
    """

    eos_token_ids: tuple[int, ...] = ()  # config.json's first, then generation_config.json's further ones
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # -1: off
    min_p: float | None = None
    repetition_penalty: float | None = None
    not_applied: tuple[str, ...] = ()  # settings of generation_config.json that nobody reads and that may matter


SAMPLING_RANGES: dict[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= MAX_TEMPERATURE,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value.is_integer() and value <= MAX_TOP_K,  # not above 0: off
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: MIN_REPETITION <= value <= MAX_REPETITION,
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts about a model that a gateway needs."""

    vocab_size: int
    max_model_len: int  # positions that the model was made for
    generation: GenerationDefaults
    digest: str = ""  # see model_digest; empty: unknown
    pooling: Pooling = Pooling.LAST  # of embeddings, where a request does not say
    normalizes: bool = True  # embeddings have the length 1, where a request does not say
    texts: TextPreparation = UNCHANGED  # what becomes of texts for embeddings
    generates: bool = True  # False: it makes embeddings alone
    cross_encoder: CrossEncoder | None = None  # None: it scores a pair of texts by their embeddings
    max_logprobs: int = 20  # alternatives of a token that a request may ask for; -1: the whole vocabulary


def read_model_info(files: ModelFiles, overrides: Settings | None = None) -> ModelInfo:
    """Reads limits and defaults of a model. overrides: see `read_generation_defaults`. Raises ModelError."""
    with naming(files):
        config = _config(files)
        cross_encoder = read_cross_encoder(files.config(), files.tokenizer_config())
        modules = read_sentence_modules(files.path) if files.path.is_dir() and cross_encoder is None else None
        own_pooling = Pooling.LAST if cross_encoder is None else cross_encoder.pooling
        return ModelInfo(
            vocab_size=require_int(config, "vocab_size", "config.json"),
            max_model_len=require_int(config, "max_position_embeddings", "config.json"),
            generation=read_generation_defaults(files, overrides),
            digest=model_digest(files),
            pooling=own_pooling if modules is None else modules.pooling,
            normalizes=modules is None or modules.normalizes,
            texts=UNCHANGED if modules is None else modules.texts,
            generates=generates(files.config()),
            cross_encoder=cross_encoder,
        )


def generates(config: Settings) -> bool:
    """Returns False for a model that makes embeddings alone, by the values of its config.json."""
    names = config.get("architectures")
    embeds_alone = isinstance(names, list) and any(str(name).endswith(_EMBED_ALONE) for name in names)
    return not embeds_alone and config.get("is_causal") is not False


def model_digest(files: ModelFiles) -> str:
    """Returns a digest, 32 hex digits, that tells the model's configuration and tokenizer from others'. Raises
    ModelError.

    Gateways and workers compare it, so that no gateway sends one model's tokens to another's worker.
    """
    digest = blake2b(digest_size=16)
    for part in files.identity():
        digest.update(blake2b(part).digest())
    return digest.hexdigest()


def read_generation_defaults(files: ModelFiles, overrides: Settings | None = None) -> GenerationDefaults:
    """Reads EOS ids and sampling defaults from config.json and generation_config.json. Raises ModelError.

    overrides: sampling values, named as in generation_config.json, that replace the model's own.
    """
    where, values = "generation_config.json", files.generation_config()
    eos = (*_eos_ids(_config(files), "config.json"), *_eos_ids(values, where))
    sampling = sampling_defaults(values, where) | sampling_defaults(overrides or {}, "override")
    return GenerationDefaults(eos_token_ids=tuple(dict.fromkeys(eos)), not_applied=_not_applied(values), **sampling)


def sampling_defaults(values: Settings, where: str) -> dict[str, Any]:
    """Returns the fields of `GenerationDefaults` that these values set. Raises ModelError for a value out
    of its range.
    """
    found = {name: _number(values, name, where, in_range) for name, in_range in SAMPLING_RANGES.items()}
    named = {name: value for name, value in found.items() if value is not None}
    if "top_k" in named:
        named["top_k"] = int(named["top_k"]) if named["top_k"] > 0 else -1
    return named


def _config(files: ModelFiles) -> Settings:
    return {key: value for key, value in files.config().items() if key in CONFIG_KEYS}


def _eos_ids(values: Settings, where: str) -> list[int]:
    found = values.get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"{where}: eos_token_id is {found!r}, an integer or a list of integers was expected")
    return ids


def _number(values: Settings, key: str, where: str, in_range: Callable[[float], bool]) -> float | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{where}: {key} is {value!r}, a number was expected")
    if not abs(value) <= MAX_TOP_K or not in_range(float(value)):  # no setting has a wider range; floats have an end
        raise ModelError(f"{where}: {key} is {str(value)[:20]}, which is out of its range")
    return float(value)


# Settings of generation_config.json that need not be read, by the reason.
_MEAN_NOTHING = {
    "names and versions": {"_from_model_config", "transformers_version"},
    "tokens that the tokenizer's files name, or that another kind of model has": {
        "bos_token_id", "pad_token_id", "decoder_start_token_id", "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
    },
    "sampling values apply whatever it is, as in vLLM": {"do_sample"},
    "the same answers, computed in another way": {
        "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind",
        "cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile",
        "is_assistant", "low_memory", "max_cache_len", "max_matching_ngram_size", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "prefill_chunk_size", "prompt_lookup_num_tokens", "speculation_type",
        "target_lookbehind", "use_cache", "use_mtp",
    },
    "what a call of `transformers` returns beside the tokens": {
        "output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate",
        "return_legacy_cache",
    },
    "nothing is to be removed, or to be scaled to 1, before a token is drawn": {
        "remove_invalid_values", "renormalize_logits",
    },
    "details of a search by beams, which num_beams asks for": {
        "diversity_penalty", "early_stopping", "length_penalty", "num_beam_groups",
    },
    "in GGUF files, details of what another setting asks for": {
        "mirostat_eta", "mirostat_tau", "penalty_last_n", "xtc_threshold",
    },
}  # fmt: skip

# Further settings that are not applied, with the values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ([], {}),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "typical_p": (1,),
    # In GGUF files:
    "mirostat": (0,),
    "penalty_repeat": (1,),
    "xtc_probability": (0,),
}
_NEED_NOT_BE_APPLIED = frozenset({"eos_token_id", *SAMPLING_RANGES}.union(*_MEAN_NOTHING.values()))


def _not_applied(values: Settings) -> tuple[str, ...]:
    """Returns the names of settings that nobody reads and that may change an answer."""
    return tuple(
        key
        for key, value in values.items()
        if key not in _NEED_NOT_BE_APPLIED and value is not None and value not in _NEUTRAL.get(key, ())
    )
