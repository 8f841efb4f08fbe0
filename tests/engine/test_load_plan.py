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
INT8_KV = {"kv_cache_dtype": KvCacheDtype.INT8, "dtype": "bfloat16"}
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
        (FP8_KV, "float32", "--kv-cache-dtype fp8 needs a model in bfloat16 or float16 on a GPU, not float32"),
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


@pytest.mark.usefixtures("no_gpu")
def test_on_a_cpu_tokens_have_scales_where_the_checkpoint_has_none(directory: Path, tmp_path: Path) -> None:
    """Those of a checkpoint are for e4m3. int8 has its own."""
    plain, fp8, int8 = (plan_load(engine(directory, **kv)) for kv in ({}, FP8_KV, INT8_KV))
    assert [plan.kv_scales for plan in (plain, fp8, int8)] == [None] * 3
    assert (fp8.layout.dtype, fp8.layout.token_scales, fp8.notices) == ("float8_e4m3fn", True, ())
    assert (int8.layout.dtype, int8.layout.token_scales, int8.notices) == ("int8", True, ())
    assert int8.layout.token_bytes == fp8.layout.token_bytes == 2 * 2 * 2 * (16 + 4)  # heads, layers, K and V
    scaled = with_scale(directory, tmp_path, 0.5)
    static = plan_load(engine(scaled, **FP8_KV))
    assert not static.layout.token_scales
    assert static.layout.token_bytes == 2 * 2 * 2 * 16
    assert static.kv_scales is not None
    assert plan_load(engine(scaled, **INT8_KV)).layout == int8.layout


@pytest.mark.usefixtures("no_gpu")
def test_kv_in_other_codes_is_not_interchangeable(directory: Path, tmp_path: Path) -> None:
    """Nor of a model that computes in another dtype, or with static scales of other tokens' own."""
    kinds: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, FP8_KV, INT8_KV]
    kinds += [kind | {"dtype": "float32"} for kind in kinds[2:]]
    found = [plan_load(engine(directory, **options)).fingerprint() for options in kinds]
    found.append(plan_load(engine(with_scale(directory, tmp_path, 0.5), **FP8_KV)).fingerprint())
    assert len(set(found)) == len(found)


@pytest.mark.usefixtures("gpu")
def test_static_scales_are_the_same_on_a_cpu_and_a_gpu(directory: Path, tmp_path: Path) -> None:
    scaled = with_scale(directory, tmp_path, 0.5)
    of_gpu, of_cpu = (
        plan_load(engine(scaled, device=device, **FP8_KV)) for device in (DeviceKind.AUTO, DeviceKind.CPU)
    )
    assert of_gpu.layout == of_cpu.layout
    assert of_gpu.fingerprint() == of_cpu.fingerprint()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("kind", [KvCacheDtype.FP8, KvCacheDtype.INT8])
def test_codes_that_a_cpu_does_not_keep_are_refused(kind: KvCacheDtype, directory: Path, tmp_path: Path) -> None:
    option = f"--kv-cache-dtype {kind}"
    assert refusal(directory, kv_cache_dtype=kind, kernels="torch") == (
        f"{option} needs kernels on a CPU: not with --kernels torch"
    )
    assert refusal(directory, kv_cache_dtype=kind, dtype="float16").startswith(f"{option} needs kernels on a CPU: ")
    latents = write_checkpoint(tmp_path / "latents", "deepseek_v3")
    assert refusal(latents, kv_cache_dtype=kind) == f"{option} is not there for latent KV yet: leave it out"
    encoder = write_checkpoint(tmp_path / "encoder", "bert")
    assert refusal(encoder, kv_cache_dtype=kind) == (
        f"{option} is for models that generate: this one makes embeddings, and keeps no KV"
    )


@pytest.mark.usefixtures("gpu")
def test_int8_is_refused_on_a_gpu(directory: Path) -> None:
    assert refusal(directory, **INT8_KV) == "--kv-cache-dtype int8 is for the CPU alone: the device is a GPU"


def test_whole_experts_need_ranks_and_a_model_with_experts(directory: Path, tmp_path: Path) -> None:
    on_cpu = {"device": DeviceKind.CPU, "expert_parallel": True}
    needed = "--expert-parallel divides experts among ranks: say how many with --tensor-parallel-size"
    mixtral = write_checkpoint(tmp_path / "model", "mixtral", num_local_experts=3)
    assert refusal(mixtral, **on_cpu) == needed
    without = "--expert-parallel is for models with experts: this one has none"
    assert refusal(directory, tensor_parallel_size=2, **on_cpu) == without
    assert refusal(mixtral, tensor_parallel_size=4, **on_cpu) == "4 ranks cannot share 3 experts"
    plan = plan_load(engine(mixtral, tensor_parallel_size=2, **on_cpu))
    columns = plan_load(engine(mixtral, tensor_parallel_size=2, device=DeviceKind.CPU))
    assert plan.fingerprint() == columns.fingerprint(), "KV of both may be exchanged"
    assert plan.shard(0).layout == columns.shard(0).layout


@pytest.mark.usefixtures("gpu")
def test_whole_experts_are_for_the_cpu(tmp_path: Path) -> None:
    mixtral = write_checkpoint(tmp_path / "model", "mixtral")
    assert refusal(mixtral, expert_parallel=True) == "--expert-parallel is for the CPU so far: --device cpu says so"


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


def with_scales(directory: Path, copy: Path, scales: torch.Tensor) -> Path:
    """A copy with scales for K and V of each layer and head, float32[layers, 2, kv_heads]."""
    copy.mkdir()
    for path in directory.iterdir():
        if path.suffix == ".json":
            (copy / path.name).write_bytes(path.read_bytes())
    names = {
        f"model.layers.{layer}.self_attn.{kind}_scale": scales[layer, plane].clone()
        for layer in range(len(scales))
        for plane, kind in enumerate("kv")
    }
    save_tensors(copy / "model.safetensors", load_file(directory / "model.safetensors") | names)
    return copy


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
