"""Sampling on the device of the logits: parameters travel with the rest of a step, and ids stay for the next step."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from services.engine.kernels.gpu.sampling import DeviceEdits, DeviceSampling, draw, edit_logits, greedy, logprobs
from services.engine.runner.base import LogitEdits, SamplingBatch, StepLogprobs, common_width, wide_rows
from services.engine.runner.gpu.device import Device
from services.engine.runner.gpu.step_buffer import StepBuffer
from services.engine.runner.ranking import likeliest_of, ranks


@dataclass(slots=True, eq=False)
class Wanted:
    """The parameters by which a step's tokens are sampled; they are on the device once the step's copy has run."""

    params: DeviceSampling | None  # None: all greedy
    edits: DeviceEdits | None
    masks: "DeviceMasks | None"
    widths: Tensor | None  # int32[N], of logprobs; None: no row wants them
    width: int  # the `common_width` of `widths`
    wide: Sequence[tuple[int, int]]  # see `wide_rows`
    named: "DeviceNamed | None" = None


@dataclass(slots=True, eq=False)
class DeviceNamed:
    """`NamedLogprobs` on the device."""

    rows: Tensor  # int64[M]
    token_ids: Tensor  # int64[M, K]


@dataclass(slots=True, eq=False)
class DeviceMasks:
    """`TokenMasks` on the device."""

    rows: Tensor  # int64[M]
    bits: Tensor  # int32[M, ceil(vocab / 32)], see TokenMasks


class GpuSampler:
    """The sampler of one runner. Each step overwrites its `sampled`."""

    def __init__(self, device: Device, max_tokens: int) -> None:
        """max_tokens: that a step samples."""
        self.sampled = torch.zeros(max_tokens, dtype=torch.int32, device=device.torch)

    def stage(self, batch: SamplingBatch, buffer: StepBuffer) -> Wanted:
        """Puts the parameters into the buffer, whose copy brings them to the device."""
        return Wanted(
            params=None if batch.all_greedy else _params(batch, buffer),
            edits=None if batch.edits is None else _edits(batch.edits, buffer),
            masks=None if batch.edits is None else _masks(batch.edits, buffer),
            widths=buffer.put(batch.num_logprobs) if batch.any_logprobs else None,
            width=common_width(batch.num_logprobs) if batch.any_logprobs else 0,
            wide=wide_rows(batch.num_logprobs) if batch.any_logprobs else (),
            named=None
            if batch.named is None
            else DeviceNamed(buffer.put(batch.named.rows), buffer.put(batch.named.token_ids)),
        )

    def sample(self, logits: Tensor, wanted: Wanted) -> list[Tensor]:
        """Samples one token for each row of logits, [N, vocab]. Returns int32[N], NOT_FINITE for rows whose logits are
        not all finite, and logprobs if they are wanted, as `score` without ranks.
        """
        sampled, raw, edited = self.sampled[: len(logits)], logits, wanted.edits is not None
        if wanted.edits is not None:
            logits = logits.to(torch.float32, copy=True)
            edit_logits(logits, wanted.edits)
            if wanted.masks is not None:
                mask_logits(logits, wanted.masks)
            mark_not_finite(raw, logits)
        if wanted.params is None:
            greedy(logits, sampled, edited=edited)
        else:
            draw(logits, wanted.params, sampled, edited=edited)
        if wanted.widths is None:
            return [sampled]
        found = _logprobs(raw, sampled, wanted.widths, wanted.width)
        if wanted.named is not None:
            name_alternatives(raw, wanted.named, found)
        return [sampled, *found, *_wide(raw, wanted.wide)]


def score(logits: Tensor, tokens: Tensor, width: int, wide: Sequence[tuple[int, int]] = ()) -> list[Tensor]:
    """Returns logprobs of int32[N] tokens under softmax of [N, vocab] logits, ids of the likeliest tokens, and their
    logprobs; then the tokens' ranks. float32[N], int32[N, width], float32[N, width]; int32[N].

    wide: `wide_rows`. Where there are any, two more tensors follow with their alternatives, row after row: int32[sum of
    their widths], float32[the same].
    """
    found = _logprobs(logits, tokens, torch.zeros_like(tokens), width)
    return [*found, ranks(logits, tokens.to(torch.int64)), *_wide(logits, wide)]


def read_logprobs(arrays: list[np.ndarray], widths: np.ndarray, *, ranked: bool) -> StepLogprobs:
    """Takes the arrays of `score`, or of `sample` after the tokens, from the head of a list. widths: int32[N], of the
    step.
    """
    sampled, top_ids, top = (arrays.pop(0) for _ in range(3))
    counted = arrays.pop(0) if ranked else None
    wide = {}
    if rows := wide_rows(widths):
        ids, values, start = arrays.pop(0), arrays.pop(0), 0
        for row, width in rows:
            wide[row] = ids[start : start + width], values[start : start + width]
            start += width
    return StepLogprobs(sampled, top_ids, top, counted, wide)


def _wide(logits: Tensor, rows: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Returns the alternatives of `wide_rows`. The kernel for the likeliest tokens finds one after the other, which
    would take minutes for a whole vocabulary.
    """
    if not rows:
        return []
    ids, values = zip(*(likeliest_of(logits[row], width) for row, width in rows), strict=True)
    return [torch.cat(ids), torch.cat(values)]


def _logprobs(logits: Tensor, chosen: Tensor, widths: Tensor, width: int) -> list[Tensor]:
    found = logprobs(logits, chosen, widths, width)
    return [found.sampled, found.top_ids, found.top]


def _params(batch: SamplingBatch, buffer: StepBuffer) -> DeviceSampling:
    drawn = batch.temperature > 0
    filtered = (batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)
    return DeviceSampling(
        temperature=buffer.put(batch.temperature),
        top_k=buffer.put(batch.top_k),
        top_p=buffer.put(batch.top_p),
        min_p=buffer.put(batch.min_p),
        seed=buffer.put(batch.seed.view(np.int64)),
        position=buffer.put(batch.position),
        any_filtered=bool((drawn & filtered).any()),
    )


def _edits(edits: LogitEdits, buffer: StepBuffer) -> DeviceEdits:
    return DeviceEdits(*(buffer.put(getattr(edits, field.name)) for field in fields(DeviceEdits)))


def _masks(edits: LogitEdits, buffer: StepBuffer) -> DeviceMasks | None:
    if edits.masks is None:
        return None
    return DeviceMasks(buffer.put(edits.masks.rows), buffer.put(edits.masks.bits().view(np.int32)))


def name_alternatives(logits: Tensor, named: DeviceNamed, found: list[Tensor]) -> None:
    """Puts the alternatives that rows name in the place of the likeliest ones, in the tensors of `score`."""
    _, top_ids, top = found
    own = logits[named.rows].to(torch.float32).log_softmax(dim=-1).gather(1, named.token_ids)
    top_ids[named.rows, : own.shape[1]] = named.token_ids.to(torch.int32)
    top[named.rows, : own.shape[1]] = own


def mark_not_finite(raw: Tensor, edited: Tensor) -> None:
    """Puts NaN into the edited logits of rows whose raw ones are not all finite, for the kernels that sample to see."""
    least, most = raw.aminmax(dim=1)
    edited[:, 0].masked_fill_(~(least.isfinite() & most.isfinite()), torch.nan)


def mask_logits(logits: Tensor, masks: DeviceMasks) -> None:
    """Leaves the rows with masks no other tokens, in place."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    allowed = (masks.bits[:, tokens >> 5] >> (tokens & 31).to(torch.int32)) & 1 != 0
    least = torch.finfo(torch.float32).min
    logits[masks.rows] = torch.where(allowed, logits[masks.rows].clamp(min=least), -torch.inf)
