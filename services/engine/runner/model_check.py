"""Refuses a model that no worker can serve before one is started: by its files, in a moment and without torch.

A worker refuses the same, and more, when it loads the model.
"""

from dataclasses import dataclass

from services.config import DeviceKind, LoadFormat
from services.config.engine import EngineConfig
from services.engine.kernels.cpu.availability import why_no_kernels
from services.engine.kernels.cpu.isa import IsaError
from services.engine.models.architectures import check_stages, parse_model_config
from services.engine.models.model_config import ModelConfig
from services.engine.models.weight_files import check_complete, safetensors_weights, stored_dtype
from services.engine.runner.kept_bytes import ITEM_BYTES, kept_bytes
from services.engine.runner.memory import available_bytes
from services.engine.runner.share_choice import why_not_shared
from services.protocol.model_files.base import ModelError, ModelFiles, naming
from services.protocol.model_files.gguf_file import GgufFile
from services.protocol.model_files.info import read_model_info
from services.protocol.model_files.open import open_model
from services.protocol.model_files.sentence_modules import read_sentence_modules


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about a model that a person hears of who starts it."""

    max_positions: int  # that it was made for
    has_chat_template: bool
    generates: bool = True  # False: it makes embeddings or scores alone


def check_model(engine: EngineConfig, num_workers: int) -> ModelFacts:
    """Returns facts about the model. Raises ModelError where workers, so many of them on this machine, cannot serve it.

    Looks at its configuration, its tokenizer, whether its weights are there and whole, and on a CPU at the memory.
    """
    files = open_model(engine.model)
    with naming(files):
        config = parse_model_config(files.config())
        read_model_info(files)
    check_options(engine, config)
    wanted_len(engine, config)
    files.tokenizer()
    if engine.load_format is not LoadFormat.DUMMY:
        check_weights(engine, files)
    if engine.device is DeviceKind.CPU:
        check_memory(engine, config, num_workers, one_alone="`--prefill 0 --decode 1` starts one worker alone")
    has_template = files.chat_template() is not None
    return ModelFacts(config.max_position_embeddings, has_chat_template=has_template, generates=config.generates)


def check_options(engine: EngineConfig, config: ModelConfig) -> None:
    """Raises ModelError for options that mean nothing for a model which sees both ways, and for ranks or stages that
    cannot share the model.
    """
    if engine.tensor_parallel_size > 1:
        config.shard(0, engine.tensor_parallel_size, expert_parallel=engine.expert_parallel)
    elif engine.expert_parallel:
        raise ModelError("--expert-parallel divides experts among ranks: say how many with --tensor-parallel-size")
    if engine.pipeline_parallel_size > 1:
        check_stages(config, engine.pipeline_parallel_size)
    if config.is_causal:
        return
    if engine.kv_memory_bytes is not None:
        raise ModelError("--kv-memory is for models that generate: this one makes embeddings, and keeps no KV")
    if engine.device is DeviceKind.CUDA:
        raise ModelError("--device cuda: a model that sees both ways runs on the CPU so far")


def wanted_len(engine: EngineConfig, config: ModelConfig) -> int:
    """Returns the tokens of the longest sequence, if the pool has room for them. Where the configuration does not say,
    they are as many as the model has positions, or as its files for embeddings allow. Raises ModelError.
    """
    if engine.max_model_len is None:
        modules = read_sentence_modules(engine.model) if engine.model.is_dir() and not config.num_labels else None
        longest = None if modules is None else modules.max_tokens
        return min(config.max_position_embeddings, longest or config.max_position_embeddings)
    if engine.max_model_len > (limit := config.longest_sequence):
        raise ModelError(f"max_model_len {engine.max_model_len} is more than the model's {limit} positions")
    return engine.max_model_len


def check_memory(engine: EngineConfig, config: ModelConfig, num_workers: int, *, one_alone: str) -> None:
    """Raises ModelError where the weights of all workers, with the KV that was asked for, are more than is free.

    Weights that workers share count once. one_alone: said where one worker would have room.
    """
    dtype = compute_dtype(engine, config)
    weights, kv = kept_bytes(engine, config, dtype), engine.kv_memory_bytes or 0
    is_shared = num_workers > 1 and _are_shared(engine, dtype)
    copies = 1 if is_shared else num_workers
    needed, free = copies * weights + num_workers * kv, available_bytes()
    if needed <= free:
        return
    shared = f", which {num_workers} workers share" if is_shared else ""
    with_kv = f"{',' if is_shared else ''} and --kv-memory {_gib(kv)}" if kv else ""
    each = f" for each of {num_workers} workers" if num_workers > 1 and (kv or not is_shared) else ""
    fewer = f". {one_alone}" if num_workers > 1 and weights + kv <= free else ""
    raise ModelError(
        f"the model's weights in {dtype} need {_gib(weights)}{shared}{with_kv}{each}; "
        f"{_gib(free)} of memory are free{fewer}"
    )


def _are_shared(engine: EngineConfig, dtype: str) -> bool:
    try:
        return why_not_shared(engine, why_no_kernels(dtype)) is None
    except IsaError:  # a worker refuses that
        return False


def check_weights(engine: EngineConfig, files: ModelFiles) -> None:
    """Raises ModelError where the model's weights are not there, or not whole."""
    if isinstance(files, GgufFile):
        from services.engine.models.gguf_stored import read_stored  # the library for the format takes a moment

        read_stored(files.header)
        return
    for file in safetensors_weights(engine.model):
        check_complete(file)


def compute_dtype(engine: EngineConfig, config: ModelConfig) -> str:
    """Returns the name of the dtype in which a model computes. Raises ModelError."""
    if engine.dtype in ITEM_BYTES:
        return engine.dtype
    if config.dtype is None and engine.load_format is LoadFormat.DUMMY:
        return "bfloat16"  # see DummyTensors
    return config.dtype or stored_dtype(engine.model)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
