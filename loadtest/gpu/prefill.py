"""Whole prompts in one step, against the rate at which the card multiplies large matrices."""

from collections.abc import Iterator, Sequence

from loadtest.gpu.bench_model import BenchModel, prefill_step, steady
from loadtest.gpu.card import Card
from loadtest.tables import Record
from services.engine.models.architectures import num_parameters
from services.engine.runner.gpu.gpu_runner import StepLimits

_PROMPTS = (8192, 2048)
_ROUNDS = 5


def measure(
    model: BenchModel, card: Card, prompts: Sequence[int] = _PROMPTS, rounds: int = _ROUNDS
) -> Iterator[Record]:
    """Yields a record for each length that the model takes."""
    for num_tokens in prompts:
        if num_tokens <= model.config.max_position_embeddings:
            yield _record(model, card, num_tokens, rounds)


def prompt_flops(model: BenchModel, num_tokens: int) -> float:
    """Counts operations of a prompt: products with all weights but the embeddings, attention below its diagonal, and
    one row of logits.
    """
    config = model.config
    head = config.vocab_size * config.hidden_size
    embeddings = head if config.tie_word_embeddings else 2 * head
    layers = num_parameters(config) - embeddings
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * num_tokens**2
    return 2.0 * layers * num_tokens + attention + 2.0 * head


def _record(model: BenchModel, card: Card, num_tokens: int, rounds: int) -> Record:
    limits = StepLimits(max_num_seqs=1, max_num_batched_tokens=num_tokens, max_model_len=num_tokens)
    step = prefill_step(num_tokens)
    runner = model.runner(int(step.tokens.block_tables.max()) + 1, limits)
    taken = steady(runner, step, rounds).wall
    rate = prompt_flops(model, num_tokens) / taken
    return {
        "model": model.name,
        "prompt": num_tokens,
        "step_ms": taken * 1e3,
        "tflops": rate / 1e12,
        "of_matrix_rate": rate / card.flops_per_s,
        "tokens_per_s": num_tokens / taken,
    }
