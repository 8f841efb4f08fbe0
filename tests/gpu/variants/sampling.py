"""Sampling over the vocabulary of Llama 3: of logits as they are, and of edited ones, which are float32."""

import torch

from services.engine.kernels.gpu.sampling import DeviceEdits, DeviceSampling, draw, edit_logits, greedy, logprobs
from tests.gpu.compiled import Variant, of_launch

_META = torch.device("meta")
_ROWS, _VOCAB = 8, 128_256


def variants() -> list[Variant]:
    """See `tests.gpu.compiled`."""
    ids, floats, longs = (
        torch.empty(_ROWS, dtype=dtype, device=_META) for dtype in (torch.int32, torch.float32, torch.int64)
    )
    raw, edited = (torch.empty(_ROWS, _VOCAB, dtype=dtype, device=_META) for dtype in (torch.bfloat16, torch.float32))
    edits = DeviceEdits(longs, longs, floats, longs, longs, floats, floats, floats, floats)
    free, filtered = (
        DeviceSampling(floats, ids, floats, floats, longs, longs, any_filtered) for any_filtered in (False, True)
    )
    return [
        *of_launch("greedy", lambda: greedy(raw, ids)),
        *of_launch("free", lambda: draw(raw, free, ids)),
        *of_launch("filtered", lambda: draw(raw, filtered, ids)),
        *of_launch("filtered, edited", lambda: draw(edited, filtered, ids, edited=True)),
        *of_launch("logprobs", lambda: logprobs(raw, ids, ids, 20)),
        *of_launch("edits", lambda: edit_logits(edited, edits)),
    ]
