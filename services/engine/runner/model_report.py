"""A report on a model: what it is made of, what it takes, and what of it is refused. By its files, without weights.

Nothing here needs torch for a model on the CPU.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from services.config import DeviceKind, Kernels
from services.config.engine import EngineConfig
from services.engine.kernels.cpu.availability import why_no_kernels
from services.engine.kernels.cpu.isa import IsaError, known_isa
from services.engine.models.architectures import num_parameters, read_model_config
from services.engine.models.described_parts import described_parts
from services.engine.models.model_config import ModelConfig, layout_of
from services.engine.runner.kept_bytes import kept_bytes
from services.engine.runner.kv_storage import stored_as
from services.engine.runner.memory import available_bytes
from services.engine.runner.model_check import check_weights, compute_dtype
from services.protocol.model_files.base import ModelError, ModelFiles, naming
from services.protocol.model_files.gguf_file import GgufFile
from services.protocol.model_files.info import generates, read_model_info
from services.protocol.model_files.open import open_model

KV_TOKENS = 1000  # of which the report gives the KV's memory
_ON_GPU = "Triton's, on a GPU"  # as kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of one worker's copy of a model."""

    dtype: str  # in which it computes
    num_parameters: int
    weight_bytes: int
    kv_bytes: int  # of `KV_TOKENS` tokens that all layers see, as the layout of blocks has them
    kv_window: int | None = None  # tokens: behind so many of them less is kept; None: all of it is
    kv_bytes_behind: int | None = None  # of `KV_TOKENS` tokens behind this window
    kernels: str = ""  # that would compute it here, for a person to read; empty: nobody asked


@dataclass(slots=True, kw_only=True)
class ModelReport:
    """The facts about a model. It can be served if nothing is refused.

    architecture: as config.json names it; empty: it names none. sizes: None where the files do not say them.
    """

    architecture: str = ""
    parts: dict[str, str] = field(default_factory=dict)
    max_positions: int | None = None
    sizes: ModelSizes | None = None
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Notes a ModelError as a refusal."""
        try:
            yield
        except ModelError as error:
            self.refused.append(str(error))


def report_model(engine: EngineConfig, *, with_weights: bool = True) -> ModelReport:
    """Returns what the model's files say, with everything that is refused of them. with_weights: whether files with
    weights must be there. Raises ModelError if there is no model.
    """
    report, files = ModelReport(), open_model(engine.model)
    config = None
    with report.refusing(), naming(files):
        values = files.config()
        report.architecture = _architecture(values.get("architectures"))
        config, unread = read_model_config(values)
        report.refused += map(str, unread)
    with report.refusing(), naming(files):
        read_model_info(files)
    with report.refusing():
        files.tokenizer()
    if with_weights:
        with report.refusing():
            check_weights(engine, files)
    if config is not None:
        report.parts, report.max_positions = described_parts(config), config.max_position_embeddings
        with report.refusing():
            report.parts |= _stored_parts(files)
        with report.refusing():
            kernels = kernels_here(engine, compute_dtype(engine, config))
            report.sizes = replace(sizes_of(engine, config), kernels=kernels)
            _note_memory(report, engine)
    report.refused = list(dict.fromkeys(report.refused))
    _note_template(report, files)
    return report


def summary(engine: EngineConfig) -> str:
    """Returns one line on a model that can be served. Raises ModelError."""
    files = open_model(engine.model)
    with naming(files):
        config, _ = read_model_config(files.config())
    sizes = sizes_of(engine, config)
    kernels = f", kernels: {kernels_here(engine, sizes.dtype)}" if engine.device is DeviceKind.CPU else ""
    return (
        f"{config.architecture}, {rounded(sizes.num_parameters)} parameters: {mib(sizes.weight_bytes)} of weights in "
        f"{sizes.dtype}, {_kv_words(sizes)}{kernels}"
    )


def sizes_of(engine: EngineConfig, config: ModelConfig) -> ModelSizes:
    """Returns what one worker takes for a model of this shape. Raises ModelError."""
    dtype = compute_dtype(engine, config)
    stored, token_scales = stored_as(engine, dtype, on_gpu=engine.device is DeviceKind.CUDA)
    layout = layout_of(config, engine.block_size, stored, token_scales=token_scales)
    slice_bytes = layout.block_bytes * KV_TOKENS // engine.block_size if config.is_causal else 0
    hides = config.window is not None and config.window < config.longest_sequence
    kv_window, kept = config.window if hides else None, 0
    if layout.groups is not None:
        kv_window, kept = max(layout.groups.later_windows), layout.groups.sizes[0]
    return ModelSizes(
        dtype=dtype,
        num_parameters=num_parameters(config),
        weight_bytes=kept_bytes(engine, config, dtype),
        kv_bytes=layout.num_slices * slice_bytes,
        kv_window=kv_window,
        kv_bytes_behind=None if kv_window is None else kept * slice_bytes,
    )


def kernels_here(engine: EngineConfig, dtype: str) -> str:
    """Returns the kernels that would compute a model in this dtype here, for a person to read. Raises ModelError."""
    if engine.device is not DeviceKind.CPU:
        from services.engine.runner.load_plan import plan_load  # torch, which knows the GPUs, takes seconds

        if plan_load(engine).device.type == "cuda":
            return _ON_GPU
    if engine.kernels is Kernels.TORCH:
        return "torch's operations"
    try:
        reason = why_no_kernels(dtype)
    except IsaError as error:
        raise ModelError(str(error)) from error
    return known_isa().name if reason is None else f"torch's operations ({reason})"


def _kv_words(sizes: ModelSizes) -> str:
    return f"{mib(sizes.kv_bytes)} of KV for {KV_TOKENS:,} tokens" if sizes.kv_bytes else "no KV"


def mib(num_bytes: int) -> str:
    """Returns a size in MiB, or from 1 GiB on in GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"


def _stored_parts(files: ModelFiles) -> dict[str, str]:
    """Returns how many matrices of a GGUF file are stored in which way, in words. Raises ModelError."""
    if not isinstance(files, GgufFile):
        return {}
    from services.engine.models.gguf_stored import read_stored  # the library for the format takes a moment

    matrices = (stored for stored in read_stored(files.header).values() if len(stored.shape) > 1)
    kinds = Counter(stored.quantization.name for stored in matrices)
    return {"stored as": ", ".join(f"{count} matrices {kind}" for kind, count in kinds.most_common())}


def _note_memory(report: ModelReport, engine: EngineConfig) -> None:
    assert report.sizes is not None
    needed = report.sizes.weight_bytes
    if engine.device is DeviceKind.CPU and needed > (free := available_bytes()):
        report.notes.append(f"{mib(free)} of memory are free here, the weights of one worker need {mib(needed)}")


def _note_template(report: ModelReport, files: ModelFiles) -> None:
    with report.refusing():
        if generates(files.config()) and files.chat_template() is None:
            report.notes.append("there is no chat template: chats need --chat-template")


def _architecture(names: object) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list) else ""


def rounded(number: int) -> str:
    """Returns a number with three digits and a word, or the whole of one below a million."""
    for unit, size in (("billion", 10**9), ("million", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"
