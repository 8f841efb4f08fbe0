"""Cuts what the engine sampled into one frame for each gateway, without a Python loop over rows."""

from collections.abc import Callable

import numpy as np

from services.engine.outputs import StepRows
from services.protocol.frames import Failure, Frame, Load, PackedLogprobs


def build_frame(rows: list[StepRows], gateway: int, failures: list[Failure], load: Load) -> Frame:
    """Everything in `rows` that is for this gateway, in order."""
    masks = [part.gateways == np.uint64(gateway) for part in rows]

    def gather(column: Callable[[StepRows], np.ndarray], dtype: type) -> np.ndarray:
        parts = [column(part)[mask] for part, mask in zip(rows, masks, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

    handles = gather(lambda part: part.handles, np.uint32)
    return Frame(
        handles=handles,
        positions=gather(lambda part: part.positions, np.uint32),
        counts=np.ones(len(handles), dtype=np.uint32),
        tokens=gather(lambda part: part.tokens, np.int32),
        finish=gather(lambda part: part.finish, np.uint8),
        cached=gather(lambda part: part.cached, np.int32),
        logprobs=_pack_logprobs(rows, masks),
        failures=failures,
        load=load,
    )


def _pack_logprobs(rows: list[StepRows], masks: list[np.ndarray]) -> PackedLogprobs | None:
    if all(part.logprobs is None for part in rows):
        return None
    widths, sampled, top_ids, top = [], [], [], []
    for part, mask in zip(rows, masks, strict=True):
        wanted = np.where(mask, part.widths, -1)
        widths.append(part.widths[mask])
        if part.logprobs is None:
            continue
        sampled.append(part.logprobs.sampled[wanted >= 0])
        inside = np.arange(part.logprobs.top_ids.shape[1]) < wanted[:, None]
        top_ids.append(part.logprobs.top_ids[inside])
        top.append(part.logprobs.top[inside])
    return PackedLogprobs(*(np.concatenate(parts) for parts in (widths, sampled, top_ids, top)))
