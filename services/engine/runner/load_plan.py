"""Decisions about a model before its weights are read: its device, its dtypes, the layout of its KV.

This module and `load.py` decide all that the configuration leaves open, and refuse what does not fit.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from kvtransfer.layout import KvLayout, fingerprint
from services.config import DeviceKind, KvCacheDtype, LoadFormat, Quantization
from services.config.engine import DEFAULT_GPU_MEMORY_FRACTION, EngineConfig
from services.engine.kernels.load import why_not_fused
from services.engine.models.architectures import parse_model_config
from services.engine.models.config import DecoderConfig
from services.engine.models.dummy import dummy_id
from services.engine.models.kv_scales import KvScales, read_kv_scales, unit_scales
from services.engine.models.model_config import DTYPES, ModelConfig, layers_of_stages, layout_of
from services.engine.models.quantized.at_load import Quantize, QuantizedAtLoad
from services.engine.models.registry import open_tensors, stored_dtype, weight_files
from services.engine.models.rope_config import DynamicScaling, LongRopeScaling
from services.engine.models.tensor_source import TensorSource
from services.engine.models.weight_files import weights_id
from services.engine.quantization.rounding import to_int4, to_int8
from services.engine.runner.base import spare_blocks
from services.engine.runner.kv_storage import check_kv, stored_as
from services.engine.runner.model_check import check_options, wanted_len
from services.protocol.model_files.base import ModelError, ModelFiles, naming
from services.protocol.model_files.info import read_generation_defaults
from services.protocol.model_files.open import open_model
from services.protocol.model_files.vocabulary import token_ids

_CPU = torch.device("cpu")
_FP8_CAPABILITY = (8, 9)  # of the first GPUs whose units multiply and convert e4m3
_ROUNDED = {Quantization.INT8: to_int8, Quantization.INT4: to_int4}
_MIN_BLOCKS = 2  # room for a prompt and its next position

# On a Xeon with AVX512-FP16 and AMX, [512, 1024] x [1024, 4096] took 26 ms in float16 and float32, 3.7 in bfloat16.
_FLOAT16_IS_SLOW = (
    "the checkpoint is float16 and runs in it, on a CPU as slowly as float32; dtype bfloat16 is faster, less exact"
)
_NO_SCALES = "KV is stored in FP8 with scale 1: there are no scales for it"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadPlan:
    """A model, its device and its dtypes."""

    engine: EngineConfig
    config: ModelConfig
    device: torch.device  # cpu, or a GPU with its number
    dtype: torch.dtype  # in which the model computes
    layout: KvLayout
    kv_scales: KvScales | None  # static ones of FP8 KV; None: it has none
    wanted_len: int  # tokens of one sequence, if the pool has room for them
    eos_token_ids: tuple[int, ...]
    gpu_memory_fraction: float  # of a GPU's memory, in use by this worker at most; 0 on a CPU
    notices: tuple[str, ...]  # decisions that a person should hear of, one line each

    def tensors(self) -> AbstractContextManager[TensorSource]:
        """Opens the weights as they are stored, to be read to the device. Raises ModelError."""
        source = _open(self.engine, self.config, self.device)
        return _rounded(source, _ROUNDED[self.engine.quantization]) if self.rounds_weights else source

    @property
    def rounds_weights(self) -> bool:
        """Returns True if weights are made integers while they are loaded."""
        return self.engine.quantization in _ROUNDED

    def fingerprint(self) -> str:
        """Returns the name that models have in common whose KV may be exchanged. Raises ModelError."""
        if self.engine.load_format == LoadFormat.DUMMY:
            weights = dummy_id(self.config, self.device)
        else:
            weights = weights_id(weight_files(self.engine.model), self.config)
        rope: dict[str, object] = {} if self.config.rope is None else asdict(self.config.rope)
        return fingerprint(self.layout, weights, rope, self._precision())

    def shard(self, rank: int) -> "LoadPlan":
        """Returns the plan of one rank: its part of the model, and the layout of its KV. Raises ModelError."""
        stage, rank_of_stage = self.stage_of(rank)
        layers = layers_of_stages(self.config.num_layers, self.num_stages)[stage] if self.num_stages > 1 else None
        size, expert_parallel = self.engine.tensor_parallel_size, self.engine.expert_parallel
        config = self.config.shard(rank_of_stage, size, layers, expert_parallel=expert_parallel)
        assert config.sharded is not None
        heads, here, scales = config.sharded.kv_heads, config.stage.layers, self.kv_scales
        if scales is not None:
            own = slice(here.start, here.stop), slice(heads.start, heads.stop)
            scales = KvScales(scales.k[own].contiguous(), scales.v[own].contiguous())
        layout = self.layout.part(heads, layers if self.divides_pools else None)
        return replace(self, config=config, layout=layout, kv_scales=scales)

    def stage_of(self, rank: int) -> tuple[int, int]:
        """Returns the stage of one of the worker's ranks, and which of the stage's ranks it is. Stage 0 has the last
        layers, and rank 0.
        """
        return divmod(rank, self.engine.tensor_parallel_size)

    @property
    def num_stages(self) -> int:
        """Returns how many stages share the model's layers."""
        return self.engine.pipeline_parallel_size

    @property
    def divides_pools(self) -> bool:
        """Returns True if stages have pools of their own layers. Layers in slices are of several stages: these share
        the pools of whole slices, each writing its own layers.
        """
        return self.num_stages > 1 and self.layout.groups is None

    def num_blocks(self, budget: int) -> int:
        """Returns the blocks, or slices, of a pool of so many bytes. Raises ModelError if these are too few."""
        num_blocks, least = budget // self.layout.block_bytes, _MIN_BLOCKS * self.layout.num_slices
        if num_blocks < least:
            needed = least * self.layout.block_bytes
            raise ModelError(f"{budget} bytes of KV memory are too little for this model: it needs at least {needed}")
        return num_blocks

    def pool_bytes(self, num_blocks: int) -> int:
        """Returns the bytes of a pool of so many blocks, or slices, and of the spare ones behind them."""
        num_slices = self.layout.num_slices if self.config.is_causal else 0
        return spare_blocks(num_blocks, self.engine.block_size, num_slices).stop * self.layout.block_bytes

    @property
    def num_unkept_blocks(self) -> int:
        """Returns the blocks of the longest prompt, for a model that keeps nothing in them."""
        return max(_MIN_BLOCKS, -(-self.wanted_len // self.engine.block_size))

    def _precision(self) -> dict[str, object]:
        """Returns the precision for `kvtransfer.layout.fingerprint`."""
        parts: dict[str, object] = {}
        if self.engine.quantization != Quantization.NONE:
            parts["quantization"] = self.engine.quantization.value
        if self.kv_scales is not None:
            parts |= {"dtype": dtype_name(self.dtype), "kv_scales": self.kv_scales.values()}
        elif self.layout.token_scales:
            parts |= {"dtype": dtype_name(self.dtype), "kv_scales": "of each token"}
        return parts


@contextmanager
def _rounded(opened: AbstractContextManager[TensorSource], quantize: Quantize) -> Iterator[TensorSource]:
    with opened as source:
        yield QuantizedAtLoad(source, quantize)


def plan_load(engine: EngineConfig) -> LoadPlan:
    """Reads the model's configuration, and other facts about the checkpoint. Raises ModelError."""
    device = _device(engine)
    files = open_model(engine.model)
    with naming(files):
        config = _with_score_tokens(parse_model_config(files.config()), files)
        eos_token_ids, eos_notices = _ends_of_answers(files, config)
    if not config.is_causal:
        device = _CPU
    if device != _CPU and engine.num_ranks > 1:
        option = "--tensor-parallel-size" if engine.tensor_parallel_size > 1 else "--pipeline-parallel-size"
        raise ModelError(f"{option} is for the CPU so far: --device cpu says so")
    if device != _CPU and engine.expert_parallel:
        raise ModelError("--expert-parallel is for the CPU so far: --device cpu says so")
    check_options(engine, config)
    longest = wanted_len(engine, config)
    config = config.for_lengths(longest)
    dtype, dtype_notices = _dtype(engine, config, device)
    _check_quantization(engine, config)
    _check_fp8(engine, config, dtype)
    name, on_gpu = dtype_name(dtype), device != _CPU
    not_fused = why_not_fused(name) if engine.kernels == "auto" else f"not with --kernels {engine.kernels}"
    check_kv(engine, config, name, on_gpu=on_gpu, why_no_kernels=None if on_gpu else not_fused)
    scales, scale_notices = _kv_scales(engine, config, device)
    stored, token_scales = stored_as(engine, name, has_scales=scales is not None, on_gpu=on_gpu)
    return LoadPlan(
        engine=engine,
        config=config,
        device=device,
        dtype=dtype,
        layout=layout_of(config, engine.block_size, stored, token_scales=token_scales),
        kv_scales=scales,
        wanted_len=longest,
        eos_token_ids=eos_token_ids,
        gpu_memory_fraction=0.0 if device == _CPU else _memory_fraction(engine),
        notices=(*eos_notices, *dtype_notices, *scale_notices, *_rope_notices(config, longest)),
    )


def _with_score_tokens(config: ModelConfig, files: ModelFiles) -> ModelConfig:
    """Returns the configuration with the ids of the tokens that a score is made of, if it is. Raises ModelError."""
    if not isinstance(config, DecoderConfig) or not config.score_tokens:
        return config
    ids = token_ids(files.tokenizer(), config.score_tokens)
    if max(ids) >= config.vocab_size:
        raise ModelError(f"tokenizer.json has the tokens {config.score_tokens} beyond vocab_size {config.vocab_size}")
    return replace(config, score_token_ids=ids)


def _ends_of_answers(files: ModelFiles, config: ModelConfig) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the EOS ids that the model has logits for, and notices of the others, with which no answer ends."""
    ids = read_generation_defaults(files).eos_token_ids
    tokens = tuple(id for id in ids if 0 <= id < config.vocab_size)
    strange = [str(id) for id in ids if id not in tokens]
    notice = f"no answer ends with eos_token_id {', '.join(strange)}: vocab_size is {config.vocab_size}"
    return tokens, (notice,) if strange else ()


def _rope_notices(config: ModelConfig, longest: int) -> tuple[str, ...]:
    """Returns what a person should hear of a rope that depends on the longest sequence."""
    scaling = None if config.rope is None else config.rope.scaling
    if isinstance(scaling, LongRopeScaling) and scaling.is_long:
        context = scaling.original_max_position_embeddings
        return (
            f"the rope's long factors serve all sequences, short ones too, since max_model_len {longest} is beyond its "
            f"original {context}; with --max-model-len {context} the short factors do",
        )
    if isinstance(scaling, DynamicScaling) and scaling.longest > scaling.original_max_position_embeddings:
        return (f"the rope's base is the one for {longest} tokens, for all sequences, short ones too",)
    return ()


def kv_layout(config: ModelConfig, block_size: int, dtype: torch.dtype) -> KvLayout:
    """Returns the geometry of a model's KV blocks, see `layout_of`."""
    return layout_of(config, block_size, dtype_name(dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in config.json and `KvLayout`."""
    return str(dtype).removeprefix("torch.")


def check_capability(engine: EngineConfig, capability: tuple[int, int]) -> None:
    """Raises ModelError if a GPU of this compute capability cannot do what the configuration asks for."""
    fp8 = [option for option in engine.gpu_options if option.endswith(" fp8")]
    if engine.kv_cache_dtype is KvCacheDtype.FP8:
        fp8.append("--kv-cache-dtype fp8")
    if fp8 and capability < _FP8_CAPABILITY:
        raise ModelError(f"{fp8[0]} needs a GPU of compute capability 8.9 or later, this one has {_dotted(capability)}")


def _check_quantization(engine: EngineConfig, config: ModelConfig) -> None:
    """Raises ModelError for weights that are not to be quantized once more, or in no model of this kind."""
    option = f"--quantization {engine.quantization}"
    if engine.quantization != Quantization.NONE and config.scheme is not None:
        raise ModelError(f"{option}: the checkpoint is quantized already ({config.scheme.method}), leave it out")
    if engine.quantization in _ROUNDED and not config.is_causal:
        raise ModelError(f"{option} is not there for models that see both ways: leave it out")


def _check_fp8(engine: EngineConfig, config: ModelConfig, dtype: torch.dtype) -> None:
    """Raises ModelError for weights in FP8 that no kernel multiplies."""
    if engine.quantization == Quantization.FP8 and isinstance(config, DecoderConfig) and config.experts is not None:
        raise ModelError("--quantization fp8 is not there for experts yet: leave it out")
    if engine.quantization == Quantization.FP8 and dtype != torch.bfloat16:
        raise ModelError(f"--quantization fp8 needs a model in bfloat16, not {dtype_name(dtype)}")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _device(engine: EngineConfig) -> torch.device:
    on_cpu = engine.device == DeviceKind.CPU
    if on_cpu or not _has_gpu():
        reason = "the device is the CPU" if on_cpu else "torch sees no CUDA GPU here"
        if engine.device == DeviceKind.CUDA:
            raise ModelError(f"device 'cuda': {reason}")
        if engine.gpu_options:
            raise ModelError(f"{engine.gpu_options[0]} is for GPUs alone: {reason}")
        return _CPU
    if engine.kernels != "auto":
        raise ModelError(f"--kernels {engine.kernels} is for the CPU alone: the device is a GPU")
    device = torch.device("cuda", engine.worker_index % torch.cuda.device_count())
    check_capability(engine, torch.cuda.get_device_capability(device))
    return device


def _has_gpu() -> bool:
    """Returns True if torch finds a GPU of NVIDIA's: torch for others calls them cuda too."""
    return torch.version.cuda is not None and bool(torch.cuda.is_available())


def _memory_fraction(engine: EngineConfig) -> float:
    """Returns an equal share of the GPU for each worker on it."""
    whole = DEFAULT_GPU_MEMORY_FRACTION if engine.gpu_memory_fraction is None else engine.gpu_memory_fraction
    num_gpus = torch.cuda.device_count()
    return whole / max(1, len(range(engine.worker_index % num_gpus, engine.num_workers, num_gpus)))


def _dtype(engine: EngineConfig, config: ModelConfig, device: torch.device) -> tuple[torch.dtype, tuple[str, ...]]:
    if engine.dtype in DTYPES:
        return getattr(torch, engine.dtype), ()
    if engine.dtype != "auto":
        raise ModelError(f"dtype {engine.dtype!r} is not supported (auto, {', '.join(DTYPES)})")
    own = _stored_dtype(engine, config) if config.dtype is None else getattr(torch, config.dtype)
    return own, (_FLOAT16_IS_SLOW,) if own == torch.float16 and device == _CPU else ()


def _stored_dtype(engine: EngineConfig, config: ModelConfig) -> torch.dtype:
    with _open(engine, config, _CPU) as source:
        return stored_dtype(source)


def _kv_scales(
    engine: EngineConfig, config: ModelConfig, device: torch.device
) -> tuple[KvScales | None, tuple[str, ...]]:
    if engine.kv_cache_dtype is not KvCacheDtype.FP8:
        return None, ()
    with _open(engine, config, _CPU) as source:
        scales = read_kv_scales(source, config)
    if scales is None and device == _CPU:
        return None, ()
    return (unit_scales(config), (_NO_SCALES,)) if scales is None else (scales, ())


def _open(engine: EngineConfig, config: ModelConfig, device: torch.device) -> AbstractContextManager[TensorSource]:
    return open_tensors(None if engine.load_format == LoadFormat.DUMMY else engine.model, config, device)
