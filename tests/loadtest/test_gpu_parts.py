"""The parts of `python -m loadtest.gpu` that need worker processes, on the CPU with a tiny model: do they measure?"""

from multiprocessing.connection import Connection
from typing import Any

import pytest

from loadtest.gpu import handoff, interference
from loadtest.gpu.workers import PairSetup
from loadtest.micro.worker_pair import Handoff
from services.config import DeviceKind, TransportName
from tests.loadtest.tiny_shapes import TINY_LLAMA

PAIR: dict[str, Any] = {
    "name": "tiny",
    "shape": TINY_LLAMA,
    "device": DeviceKind.CPU,
    "kernels": "torch",
    "num_threads": 1,
    "kv_memory_bytes": 4 << 20,
    "max_model_len": 1024,
}


@pytest.mark.long
def test_a_handoff_is_measured_between_two_workers_and_named_by_its_transport() -> None:
    pair = PairSetup(**PAIR, prefill_tokens=128, decode_tokens=128)
    setup = handoff.Setup(pair=pair, prompts=(64, 300), rounds=2, raw_rounds=2)
    rows: list[Any] = list(handoff.measure(setup))

    assert [(row["prompt"], row["blocks"]) for row in rows] == [(64, 4), (300, 19)]
    assert rows[0]["read_blocks"] == 4
    assert rows[1]["read_blocks"] in (3, 11, 19), "whole steps of 128 tokens: as many as decode had not read yet"
    for row in rows:
        assert row["mib"] == row["blocks"] * 2 * 2 * 2 * 16 * 16 * 4 / 2**20
        assert row["transport"] == "nixl"
        assert row["of_raw"] == pytest.approx(row["read_gb_per_s"] / row["raw_gb_per_s"])
        assert row["ratio"] == pytest.approx(row["ttft_pair_ms"] / row["ttft_alone_ms"])
        assert 0 < row["read_ms"] < row["ready_ms"] < 1000
        assert all(row[name] > 0 for name in ("raw_gb_per_s", "ttft_pair_ms", "ttft_alone_ms", "gap_ms"))


def test_bytes_over_grpc_are_not_taken_for_nixl() -> None:
    noted = Handoff(ready_s=1, read_s=0.5, read_blocks=4, transport=TransportName.GRPC, first_s=1, gap_s=1)
    beside = handoff.last_read([noted, noted], 1000, handoff.Raw({4: 16e3}), 4)
    assert (beside["transport"], beside["of_raw"]) == ("grpc", 0.5)
    alone = handoff.last_read([noted, noted], 1000, handoff.Raw({}, "not installed"), 4)
    assert (alone["transport"], alone["raw"]) == ("grpc", "no NIXL: not installed")
    assert "of_raw" not in alone


def test_what_nixl_does_alone_is_left_out_in_words_where_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "_send_raw", _end_at_once)
    raw = handoff.raw_reads(handoff.Setup(pair=PairSetup(**PAIR)))
    assert raw == handoff.Raw({}, "its process ended")


@pytest.mark.long
def test_streams_are_watched_with_and_without_long_prompts() -> None:
    pair = PairSetup(**PAIR, prefill_tokens=128, decode_tokens=64, max_num_seqs=8)
    setup = interference.Setup(
        pair=pair, streams=3, context=32, stream_tokens=900, long_prompt=200, every_s=0.2, seconds=0.8
    )
    rows: list[Any] = list(interference.measure(setup))

    assert [row["long_prompts"] for row in rows] == ["no long prompts", "handed over", "computed by decode"]
    for row in rows:
        assert "no evidence for disaggregation" in row["caveat"]
        assert row["stream_tokens"] > 20
        assert 0 < row["itl_ms_p50"] <= row["itl_ms_p90"] <= row["itl_ms_p99"] <= row["itl_ms_max"] < 2000
    assert "sent" not in rows[0]
    for row in rows[1:]:
        assert row["sent"] == 4
        assert 1 <= row["finished"] <= 4
        assert 0 < row["ttft_ms_p50"] < 1000


def _end_at_once(pipe: Connection, setup: handoff.Setup) -> None:
    """A process that dies."""
    raise SystemExit(3)
