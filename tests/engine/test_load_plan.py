"""What is decided before weights are read: the device, what it can do, and whose KV is interchangeable."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.config import DeviceKind, KvCacheDtype, LoadFormat, Quantization
from services.config.engine import EngineConfig
from services.engine.runner.load_plan import check_capability, plan_load
from services.protocol.model_files.base import ModelError
from tests.checkpoints import save_tensors, write_checkpoint

FP8_KV = {"kv_cache_dtype": KvCacheDtype.FP8, "dtype": "bfloat16"}
FP8_WEIGHTS = {"quantization": Quantization.FP8, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, whatever this one has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a Hopper GPU, as far as torch is asked here."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def engine(directory: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=directory, **{"device": DeviceKind.AUTO, **options})


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        plan_load(engine(directory, **options))
    return str(caught.value)


@pytest.mark.usefixtures("no_gpu")
def test_auto_is_the_cpu_where_there_is_no_gpu_and_cuda_is_refused(directory: Path) -> None:
    assert plan_load(engine(directory)).device == torch.device("cpu")
    assert refusal(directory, device=DeviceKind.CUDA) == "device 'cuda': torch sees no CUDA GPU here"


@pytest.mark.usefixtures("gpu")
def test_auto_is_the_gpu_where_there_is_one(directory: Path) -> None:
    assert plan_load(engine(directory)).device == torch.device("cuda:0")
    assert plan_load(engine(directory, device=DeviceKind.CPU)).device == torch.device("cpu")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("options", "name"),
    [
        (FP8_WEIGHTS, "--quantization fp8"),
        (FP8_KV, "--kv-cache-dtype fp8"),
        ({"gpu_memory_fraction": 0.9}, "--gpu-memory-fraction 0.9"),
        ({"split_keys": 512}, "--attention-split-keys 512"),
    ],
)
def test_options_for_gpus_are_refused_elsewhere(options: dict[str, Any], name: str, directory: Path) -> None:
    assert refusal(directory, **options) == f"{name} is for GPUs alone: torch sees no CUDA GPU here"
    assert refusal(directory, device=DeviceKind.CPU, **options) == f"{name} is for GPUs alone: the device is the CPU"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("num_gpus", "dealt_out"),
    [(1, [(0, 0.3), (0, 0.3), (0, 0.3)]), (2, [(0, 0.45), (1, 0.9), (0, 0.45)]), (8, [(0, 0.9), (1, 0.9), (2, 0.9)])],
)
def test_workers_of_one_machine_share_its_gpus(
    num_gpus: int, dealt_out: list[tuple[int, float]], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    plans = [plan_load(engine(directory, worker_index=index, num_workers=3)) for index in range(3)]
    assert [plan.device.index for plan in plans] == [number for number, _ in dealt_out]
    assert [plan.gpu_memory_fraction for plan in plans] == pytest.approx([fraction for _, fraction in dealt_out])
    alone = plan_load(engine(directory, gpu_memory_fraction=0.5))
    assert (alone.device.index, alone.gpu_memory_fraction) == (0, 0.5)


@pytest.mark.usefixtures("gpu")
def test_an_option_for_the_cpu_is_refused_on_a_gpu(directory: Path) -> None:
    assert "--kernels torch is for the CPU alone" in refusal(directory, kernels="torch")


@pytest.mark.parametrize("options", [FP8_KV, FP8_WEIGHTS])
def test_fp8_needs_a_gpu_that_has_it(options: dict[str, Any], directory: Path) -> None:
    for capability in ((8, 9), (9, 0), (10, 0)):
        check_capability(engine(directory, **options), capability)
    with pytest.raises(ModelError, match=r"needs a GPU of compute capability 8\.9 or later, this one has 8\.0"):
        check_capability(engine(directory, **options), (8, 0))
    check_capability(engine(directory), (8, 0))


@pytest.mark.usefixtures("gpu")
def test_fp8_kv_takes_a_byte_and_has_the_checkpoint_s_scales(directory: Path, tmp_path: Path) -> None:
    plain, fp8 = plan_load(engine(directory)), plan_load(engine(directory, **FP8_KV))
    assert plain.kv_scales is None
    assert plain.layout.block_bytes == 4 * fp8.layout.block_bytes, "float32 beside one byte"
    assert (fp8.layout.dtype, fp8.dtype) == ("float8_e4m3fn", torch.bfloat16)
    assert fp8.kv_scales is not None
    assert fp8.kv_scales.values() == [[[1.0, 1.0]] * 2] * 2
    assert len(fp8.notices) == 1
    scaled = plan_load(engine(with_scale(directory, tmp_path, 0.5), **FP8_KV))
    assert scaled.kv_scales is not None
    assert scaled.kv_scales.k[1].tolist() == [0.5, 0.5]
    assert scaled.notices == ()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("options", "dtype", "words"),
    [
        (FP8_WEIGHTS, "float16", "--quantization fp8 needs a model in bfloat16, not float16"),
        (FP8_KV, "float32", "--kv-cache-dtype fp8 needs a model in bfloat16 or float16, not float32"),
    ],
)
def test_fp8_needs_a_model_that_computes_in_few_bits(
    options: dict[str, Any], dtype: str, words: str, directory: Path
) -> None:
    assert refusal(directory, **options | {"dtype": dtype}) == words


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_is_not_nvidias_is_none(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert refusal(directory, device=DeviceKind.CUDA) == "device 'cuda': torch sees no CUDA GPU here"


@pytest.mark.usefixtures("gpu")
def test_kv_that_was_rounded_otherwise_is_not_interchangeable(directory: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"dtype": "bfloat16"},
        FP8_WEIGHTS,
        FP8_KV,
        FP8_KV | {"dtype": "float16"},
        FP8_KV | FP8_WEIGHTS,
        {"load_format": LoadFormat.DUMMY},
        {"load_format": LoadFormat.DUMMY, "device": DeviceKind.CPU},
    ]
    found = [plan_load(engine(directory, **options)).fingerprint() for options in kinds]
    assert len(set(found)) == len(kinds)
    assert found == [plan_load(engine(directory, **options)).fingerprint() for options in kinds]
    on_cpu = plan_load(engine(directory, device=DeviceKind.CPU)).fingerprint()
    assert on_cpu == found[0], "a CPU's KV of a checkpoint is as good as a GPU's"


@pytest.mark.usefixtures("gpu")
def test_latents_run_on_a_gpu_but_not_in_fp8(tmp_path: Path) -> None:
    latents = write_checkpoint(tmp_path / "model", "deepseek_v3")
    assert plan_load(engine(latents)).device == torch.device("cuda:0")
    assert refusal(latents, **FP8_KV) == "--kv-cache-dtype fp8 is not there for latent KV yet: leave it out"


@pytest.mark.usefixtures("gpu")
def test_fp8_kv_with_other_scales_is_not_interchangeable(directory: Path) -> None:
    """Even of weights that are the same to `weights_id`."""
    plan = plan_load(engine(directory, **FP8_KV))
    before = plan.fingerprint()
    assert plan.kv_scales is not None
    plan.kv_scales.v[1, 0] = 0.5
    assert plan.fingerprint() != before


def with_scale(directory: Path, tmp_path: Path, scale: float) -> Path:
    """A copy with a scale for layer 1's keys."""
    copy = tmp_path / f"scaled-{scale}"
    copy.mkdir()
    for path in directory.iterdir():
        if path.suffix == ".json":
            (copy / path.name).write_bytes(path.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    save_tensors(copy / "model.safetensors", tensors | {"model.layers.1.self_attn.k_scale": torch.tensor(scale)})
    return copy
