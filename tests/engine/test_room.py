"""Room for further workers on a machine where some run."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.config import ShareWeights
from services.config.engine import EngineConfig
from services.engine.models.architectures import parse_model_config, weight_bytes
from services.engine.runner import model_check
from services.engine.runner.load_plan import plan_load
from services.engine.runner.model_check import check_memory
from services.engine.runner.room import Card, check_card, check_room, needed_bytes
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.open import open_model
from tests.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Of a tiny model, on the CPU."""
    return EngineConfig(model=write_checkpoint(tmp_path_factory.mktemp("tiny") / "model"))


def test_a_machine_has_room_for_workers_whose_weights_and_kv_fit(engine: EngineConfig) -> None:
    check_room(engine, [2, 3])
    with pytest.raises(ModelError, match=r"--kv-memory 1048576\.00 GiB; .* GiB of memory are free$"):
        check_room(replace(engine, kv_memory_bytes=1 << 50), [2])


def test_weights_that_workers_share_are_counted_once(engine: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_model_config(open_model(engine.model).config())
    weights = weight_bytes(config, 4)
    monkeypatch.setattr(model_check, "available_bytes", lambda: weights + 3 * MIB)
    asked = replace(engine, kv_memory_bytes=MIB, share_weights=ShareWeights.ON)
    check_memory(asked, config, 3, one_alone="")
    with pytest.raises(ModelError, match=r"GiB, which 4 workers share, and --kv-memory 0\.00 GiB for each of 4"):
        check_memory(asked, config, 4, one_alone="")
    with pytest.raises(ModelError, match=r"GiB and --kv-memory 0\.00 GiB for each of 3 workers; .* free\. One alone$"):
        check_memory(replace(asked, share_weights=ShareWeights.OFF), config, 3, one_alone="One alone")


def test_a_cpu_s_room_is_found_without_torch(engine: EngineConfig) -> None:
    code = (
        "import sys; from pathlib import Path; from services.engine.runner.room import check_room\n"
        "from services.config.engine import EngineConfig\n"
        f"check_room(EngineConfig(model=Path({str(engine.model)!r})), [1]); sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_worker_takes_its_share_of_a_card_or_what_was_asked_for(engine: EngineConfig) -> None:
    plan = replace(plan_load(engine), gpu_memory_fraction=0.45)
    assert needed_bytes(plan, total=80 * GIB) == 36 * GIB
    weights = weight_bytes(plan.config, 4)
    asked = replace(plan, engine=replace(engine, kv_memory_bytes=GIB))
    assert needed_bytes(asked, total=80 * GIB) == weights + GIB
    assert needed_bytes(plan, total=1000) == weights  # more than its share


def test_a_card_whose_workers_share_it_fully_has_room_for_one_more_when_one_is_gone() -> None:
    share = 36 * GIB
    check_card(Card(number=0, free=40 * GIB, total=80 * GIB), [share])
    with pytest.raises(ModelError, match=r"^GPU 1 has 7\.00 GiB of 80\.00 GiB free, and 36\.00 GiB are needed\. "):
        check_card(Card(number=1, free=7 * GIB, total=80 * GIB), [share])
    with pytest.raises(ModelError, match=r"36\.00 GiB and 36\.00 GiB are needed"):
        check_card(Card(number=0, free=40 * GIB, total=80 * GIB), [share, share])
