"""A worker in which only the model is missing.

The KV has the shape of a small model's, and steps take time in proportion to their tokens, without a core.
"""

from kvtransfer.layout import KvLayout
from loadtest.micro.idle_runner import BLOCK_SIZE, IdleRunner
from services.config import TransportName, WorkerRole
from services.engine.runner.base import StepInput
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.worker.transports import make_transports
from services.worker.worker import WorkerParts

LAYOUT = KvLayout(num_layers=12, num_kv_heads=4, head_dim=64, block_size=BLOCK_SIZE, dtype="bfloat16")  # 192 KiB
VOCABULARY = 8192
MAX_MODEL_LEN = 16_384

NUM_BLOCKS = 2048
_TOKEN_S, _LEAST_STEP_S = 20e-6, 0.001


class _TimedRunner(IdleRunner):
    """Takes time in proportion to the tokens of a step."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, layout=LAYOUT, vocab_size=VOCABULARY)
        self._kv.array.fill(1)  # in memory, not only asked for

    def launch(self, step: StepInput) -> None:
        """See `Runner.launch`."""
        super().launch(step)
        self.step_s = max(_LEAST_STEP_S, len(step.tokens.token_ids) * _TOKEN_S)


def timed_parts(max_num_batched_tokens: int, role: WorkerRole) -> WorkerParts:
    """Makes the parts of such a worker; its KV moves over NIXL."""
    prefill, decode = PrefillScheduler(max_num_batched_tokens), DecodeScheduler(max_num_batched_tokens)
    return WorkerParts(
        role=role,
        runner=_TimedRunner(),
        scheduler=prefill if role is WorkerRole.PREFILL else decode,
        make_transports=make_transports(TransportName.NIXL),
        fingerprint="micro",
        eos_token_ids=(),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
    )
