"""The cost of structured output to a worker: first masks of grammars, masks of a batch, decode steps beside plain ones.

Steps are those of a model, over the demo model unless another is named. A batch with masks and the same batch without
decode in turn, on all cores; each step's time is that of the engine's whole round. The schema is one object with forty
fields of every kind, 2 KB of JSON.
"""

import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from kvtransfer.ids import AttemptId, GatewayId
from loadtest.cannot_run import CannotRun
from loadtest.tables import Record
from services.config import DeviceKind
from services.config.engine import EngineConfig
from services.engine.engine import Engine
from services.engine.kernels.cpu.openmp import load_openmp
from services.engine.sampling.guidance import Guidance, GuidedRow, GuidedSequence
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.request import Kind, Request
from services.gateway.api.grammars.structured_output import grammar_of
from services.gateway.api.requests.structured import StructuredOutputs
from services.launcher import demo_model
from services.protocol.capsule import Capsule
from services.protocol.model_files.open import open_model
from services.protocol.sampling import SamplingParams

_BATCH, _ROUNDS, _STEPS = 64, 6, 60
_PROMPT = 64
_NOTHING = np.zeros(0, dtype=np.int64)
_KINDS = (
    {"type": "string", "maxLength": 40},
    {"type": "integer", "minimum": 0, "maximum": 99},
    {"type": "array", "items": {"type": "string"}},
    {"enum": ["red", "green", "blue"]},
)


def measure(model: Path | None) -> list[Record]:
    """Measures masks, then steps. Raises CannotRun without a model."""
    load_openmp()
    from services.engine.runner.load import load_runner  # imports torch, which must find OpenMP loaded

    path = model or demo_model.find().path
    loaded = load_runner(EngineConfig(model=path, device=DeviceKind.CPU, kv_memory_bytes=256 << 20))
    if loaded.cores is None:
        raise CannotRun("no OpenMP is loaded that can be told its threads")
    guidance = Guidance(open_model(path).tokenizer().decode(), loaded.vocab_size, loaded.eos_token_ids)
    engine = Engine(
        loaded.runner,
        DecodeScheduler(_BATCH * _PROMPT),
        max_num_seqs=_BATCH,
        max_model_len=_PROMPT + _STEPS + 40,
        eos_token_ids=loaded.eos_token_ids,
        guidance=guidance,
    )
    return [*_masks(guidance), *_steps(engine, loaded.eos_token_ids)]


def _grammar(variant: int = 0) -> str:
    properties: dict[str, Any] = {f"field{number}_{variant}": _KINDS[number % 4] for number in range(40)}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    wanted = StructuredOutputs.model_validate({"json": orjson.dumps(schema).decode()})
    return grammar_of(None, wanted)[0]


def _sequence(guidance: Guidance, variant: int) -> GuidedSequence:
    grammar = guidance.grammars.ask(_grammar(variant), (GatewayId(1), ""))
    assert grammar is not None
    return GuidedSequence(guidance, grammar)


def _masks(guidance: Guidance) -> list[Record]:
    new = [_timed(guidance, [_sequence(guidance, variant)]) for variant in range(1, 30)]
    known = [_timed(guidance, [_sequence(guidance, 1)]) for _ in range(100)]
    batch = [_sequence(guidance, 1) for _ in range(_BATCH)]
    _timed(guidance, batch)
    later = [_timed(guidance, batch) for _ in range(100)]
    figures = {"first mask of a new schema": new, "first mask of a known schema": known, "masks of a batch": later}
    return [
        {"what": what, "rows": _BATCH if what == "masks of a batch" else 1, **_spread(spent)}
        for what, spent in figures.items()
    ]


def _timed(guidance: Guidance, sequences: list[GuidedSequence]) -> float:
    began = time.perf_counter()
    guidance.masks([GuidedRow(row, sequence, [], _NOTHING) for row, sequence in enumerate(sequences)]).bits()
    return (time.perf_counter() - began) * 1e3


def _steps(engine: Engine, eos_token_ids: tuple[int, ...]) -> list[Record]:
    """Decodes the batch without and with a grammar in turn: for each pair of rounds, the ratio of their times."""
    # A long text, in which nearly all tokens may come: the masks with the most bits, and answers that do not end.
    text = StructuredOutputs.model_validate({"regex": '"[^"]{500,}"'})
    grammars = {"no grammar": "", "JSON": grammar_of(None, text)[0]}
    spent: dict[str, list[float]] = {kind: [] for kind in grammars}
    for number in range(_ROUNDS):
        for kind, grammar in grammars.items():
            spent[kind].append(statistics.median(_decode(engine, grammar, number)))
    ratios = [plain / guided for plain, guided in zip(*spent.values(), strict=True)]
    return [
        *({"what": f"decode step, {kind}", "rows": _BATCH, **_spread(times)} for kind, times in spent.items()),
        {"what": "tokens/s with JSON over without", "rows": _BATCH, "unit": "ratio", **_spread_of(ratios)},
    ]


def _decode(engine: Engine, grammar: str, number: int) -> list[float]:
    """Submits the batch, and returns the times of its steps while all of it decodes, in ms."""
    for row in range(_BATCH):
        prompt = (np.arange(_PROMPT, dtype=np.int32) * 37 + row * 101 + number) % 2000 + 10
        sampling = SamplingParams(_STEPS + 20, temperature=0.0, ignore_eos=not grammar, grammar=grammar)
        capsule = Capsule(prompt, len(prompt), sampling)
        handle = (number * 2 + bool(grammar)) * _BATCH + row + 1
        engine.submit(Request(AttemptId(GatewayId(1), handle), capsule, Kind.LOCAL, arrival=0.0, deadline=math.inf))
    while len(engine.sequences.batch.slots_in(Phase.DECODE)) < _BATCH:
        engine.step(0.0)
    times = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        engine.step(0.0)
        times.append((time.perf_counter() - began) * 1e3)
    while engine.step(0.0):
        pass
    engine.take_outputs()
    return times


def _spread(spent_ms: list[float]) -> Record:
    return {"unit": "ms", **_spread_of(spent_ms)}


def _spread_of(values: list[float]) -> Record:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}
