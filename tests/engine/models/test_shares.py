"""Shares of tensors: `TensorSource.read` of rows and columns is a part of the whole tensor, and touches little else."""

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.models.architectures import parse_model_config, shapes_of
from services.engine.models.dummy import DummyTensors
from services.engine.models.gguf_stored import QUANTIZED
from services.engine.models.registry import open_tensors
from services.engine.models.tensor_source import TensorSource
from services.protocol.model_files.open import open_model
from tests.checkpoints import write_checkpoint
from tests.gguf_files import write_gguf
from tests.seeds import first_of

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
KINDS = sorted(QUANTIZED | {"F32", "F16", "BF16"})
# Each row has several blocks of 256 numbers, and Q has several heads.
SEVERAL_BLOCKS: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 768,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "attention_bias": True,
}
LAYER = "model.layers.0."
MATRICES = [
    f"{LAYER}{name}.weight" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
]
VECTORS = [f"{LAYER}{name}" for name in ("self_attn.q_proj.bias", "self_attn.v_proj.bias", "input_layernorm.weight")]


def opened(path: Path) -> TensorSource:
    return ExitStack().enter_context(open_tensors(path, parse_model_config(open_model(path).config()), CPU))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), **SEVERAL_BLOCKS)


@pytest.fixture(scope="module", params=["safetensors", "dummy", *KINDS])
def source(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> TensorSource:
    if request.param == "safetensors":
        return opened(checkpoint)
    if request.param == "dummy":
        config = parse_model_config(open_model(checkpoint).config())
        return DummyTensors(config, shapes_of(config), CPU)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return opened(write_gguf(path, checkpoint, GGMLQuantizationType[request.param]))


@pytest.fixture(scope="module")
def whole(source: TensorSource) -> dict[str, torch.Tensor]:
    return {name: source.read(name, torch.float32).clone() for name in MATRICES + VECTORS}


def parts(length: int) -> st.SearchStrategy[slice | None]:
    """All, or from one place to another, which may be the same."""
    place = st.integers(0, length)
    return st.none() | st.tuples(place, place).map(lambda ends: slice(*sorted(ends)))


@pytest.mark.few(6)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_part_is_that_of_the_whole_tensor(data: st.DataObject, source: TensorSource, whole: dict[str, Any]) -> None:
    """To the bit, wherever it cuts a head of Q and K, whose rows are in another order in some files, or a block of a
    quantization.
    """
    name = data.draw(st.sampled_from(MATRICES + VECTORS))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    shape = whole[name].shape
    rows = data.draw(parts(shape[0]))
    columns = data.draw(parts(shape[1])) if len(shape) == 2 else None
    expected = whole[name][rows or slice(None)]
    if columns is not None:
        expected = expected[:, columns]
    found = source.read(name, dtype, rows, columns)
    assert found.dtype == dtype
    assert torch.equal(found, expected.to(dtype))
    if not source.lends:
        assert found.untyped_storage().nbytes() == found.nbytes, "it holds no memory of what was cut off"
    if len(shape) == 2 and (matrix := source.coded(name, rows, columns)) is not None:
        assert torch.equal(matrix.numbers(torch.float32), expected.to(torch.float32))


def test_steps_are_no_parts(checkpoint: Path) -> None:
    with pytest.raises(AssertionError, match="slice"):
        opened(checkpoint).read(MATRICES[0], torch.float32, slice(0, 8, 2))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files whose MLP has rows of several pages."""
    directory = write_checkpoint(tmp_path_factory.mktemp("wide"), intermediate_size=16384, num_hidden_layers=1)
    quantized = write_gguf(directory.parent / "wide.gguf", directory, GGMLQuantizationType.Q8_0)
    return {"safetensors": directory, "gguf": quantized}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
@pytest.mark.parametrize("form", first_of(1, ["gguf", "safetensors"]))
@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [("gate_proj", slice(4096, 8192), None), ("down_proj", None, slice(4096, 8192)), ("down_proj", slice(7, 9), None)],
)
def test_no_other_page_of_the_file_is_touched(
    form: str, name: str, rows: slice | None, columns: slice | None, wide: dict[str, Path]
) -> None:
    """A process that cannot read the other pages reads the part, and dies if it reads the whole tensor."""
    tensor = f"{LAYER}mlp.{name}.weight"
    expected = opened(wide[form]).read(tensor, torch.float32, rows, columns)

    def read_guarded(what: str) -> subprocess.CompletedProcess[str]:
        ends = ",".join("" if part is None else f"{part.start}:{part.stop}" for part in (rows, columns))
        command = [sys.executable, "-m", "tests.engine.models.guarded_reading", str(wide[form]), tensor, ends, what]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    found = read_guarded("part")
    assert (found.returncode, found.stdout) == (0, f"{expected.double().sum().item()}\n"), found.stderr
    assert read_guarded("whole").returncode == -signal.SIGSEGV
