"""The launcher asks a process whether there is room."""

import os
from pathlib import Path

import pytest

from services.config.engine import EngineConfig, RoomConfig
from services.launcher import random_model, room
from services.launcher.control import CommandFailed
from services.process import lifeline


async def test_a_refusal_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_LIMIT_S", 300.0)
    engine = EngineConfig(model=random_model.made(), kv_memory_bytes=1 << 50)
    environment = os.environ | lifeline.environment()
    with pytest.raises(CommandFailed, match=r"^there is no room for more workers: the model's weights in .* are free$"):
        await room.check(RoomConfig(engine=engine, indexes=(1,)), environment)
    await room.check(RoomConfig(engine=EngineConfig(model=engine.model), indexes=(1,)), environment)


async def test_where_room_cannot_be_found_out_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RoomConfig(engine=EngineConfig(model=Path("/nowhere")), indexes=(0,))
    monkeypatch.setattr(room, "_LIMIT_S", 300.0)
    with pytest.raises(CommandFailed, match="/nowhere"):
        await room.check(config, os.environ)
    monkeypatch.setattr(room, "_LIMIT_S", 0.0)
    with pytest.raises(CommandFailed, match="was not found out in 0 s"):
        await room.check(config, os.environ)
