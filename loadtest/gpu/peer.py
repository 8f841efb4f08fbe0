"""`transformers` on the same card: prompts and decode steps of the same shape, beside ours in the same run.

Each decodes in its own way: Baton launches a step while the one before runs, the loop of `transformers` waits for every
token.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from loadtest.gpu.bench_model import BenchModel, decode_step, prefill_step, steady
from loadtest.tables import Record
from services.engine.runner.base import StepInput
from services.engine.runner.gpu.gpu_runner import StepLimits

_CELLS = ((64, 512), (8, 4096), (1, 512), (8, 512))  # batch, context
_PROMPT = 4096
_ROUNDS = 10
_WARM_UP = 2


def measure(
    model: BenchModel,
    raw: dict[str, Any],
    cells: Sequence[tuple[int, int]] = _CELLS,
    prompt: int = _PROMPT,
    rounds: int = _ROUNDS,
) -> Iterator[Record]:
    """Yields a record for each step: `transformers` with SDPA and a dynamic cache, Baton with the workers' runner."""
    peer = _peer(model, raw)
    with torch.inference_mode():
        for batch, context in cells:
            ours = _our_s(model, decode_step(batch, context), batch, batch, context, rounds)
            yield _record(model, f"decode {batch} x {context}", ours, _decode_s(peer, model, batch, context, rounds))
        ours = _our_s(model, prefill_step(prompt), 1, prompt, prompt, rounds)
        yield _record(model, f"prefill {prompt}", ours, _prefill_s(peer, model, prompt, rounds))


def peer_config(raw: dict[str, Any]) -> Any:
    """Makes a configuration of `transformers` from config.json's values."""
    from transformers import AutoConfig

    settings = dict(raw)
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def _peer(model: BenchModel, raw: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device(model.device.torch):
        return AutoModelForCausalLM.from_config(peer_config(raw), dtype=model.dtype).eval()


def _our_s(model: BenchModel, step: StepInput, rows: int, tokens: int, longest: int, rounds: int) -> float:
    limits = StepLimits(max_num_seqs=rows, max_num_batched_tokens=tokens, max_model_len=longest)
    return steady(model.runner(int(step.tokens.block_tables.max()) + 1, limits), step, rounds).wall


def _record(model: BenchModel, what: str, ours: float, theirs: float) -> Record:
    return {
        "model": model.name,
        "what": what,
        "baton_ms": ours * 1e3,
        "transformers_ms": theirs * 1e3,
        "ratio": theirs / ours,
    }


def _decode_s(peer: Any, model: BenchModel, batch: int, context: int, rounds: int) -> float:
    """Measures a step behind `context` tokens; each step's token is the likeliest of the one before."""
    found = peer(_random_ids(model, batch, context), use_cache=True, logits_to_keep=1)
    tokens, cache = found.logits[:, -1:].argmax(-1), found.past_key_values

    def step() -> None:
        nonlocal tokens
        tokens = peer(tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    return _median_s(step, model, rounds)


def _prefill_s(peer: Any, model: BenchModel, prompt: int, rounds: int) -> float:
    ids = _random_ids(model, 1, prompt)
    return _median_s(lambda: peer(ids, use_cache=True, logits_to_keep=1), model, rounds)


def _median_s(step: Callable[[], object], model: BenchModel, rounds: int) -> float:
    """Measures seconds of a step until the device has run it, after some that do not count."""
    times = []
    for _ in range(_WARM_UP + rounds):
        _finish(model)
        begin = time.perf_counter()
        step()
        _finish(model)
        times.append(time.perf_counter() - begin)
    return float(np.median(times[_WARM_UP:]))


def _finish(model: BenchModel) -> None:
    """Waits without sleeping: to wake up takes time."""
    if model.device.torch.type == "cuda":
        torch.cuda.synchronize()


def _random_ids(model: BenchModel, batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (batch, length), device=model.device.torch)
