"""What `transformers` makes of a checkpoint: the oracle for every runner."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM


class Reference:
    """A checkpoint in `transformers`."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        # Eager experts take any width, one after the other; others take multiples of 16 bytes.
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, experts_implementation="eager", **options
        )

    def tokens(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Its greedy continuation."""
        return self.run(prompt, num_tokens)[0]

    def kv(self, prompt: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer, [kv_heads, tokens, head_dim]."""
        with torch.inference_mode():
            cache = self._model(torch.tensor([prompt]), use_cache=True).past_key_values
        return [(layer.keys[0], layer.values[0]) for layer in cache.layers]

    def scores(self, prompt: list[int]) -> torch.Tensor:
        """Log-probabilities of what follows each token but the last, [tokens - 1, vocab]."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([prompt])).logits[0, :-1]
        return logits.to(torch.float32).log_softmax(-1)

    def hidden_states(self, prompt: list[int]) -> torch.Tensor:
        """Those of each token after the last norm, [tokens, size]."""
        with torch.inference_mode():
            states: torch.Tensor = self._model.base_model(torch.tensor([prompt])).last_hidden_state[0]
        return states

    def expert_pairs(self, tokens: list[int]) -> np.ndarray:
        """How many tokens each expert gets, int64[layers, experts]; of models whose experts are the `top_k` highest
        logits.
        """
        with torch.inference_mode():
            found = self._model(torch.tensor([tokens]), output_router_logits=True).router_logits
        num_experts, top_k = found[0].shape[-1], self._model.config.num_experts_per_tok
        counts = [logits.topk(top_k).indices.flatten().bincount(minlength=num_experts) for logits in found]
        pairs: np.ndarray = torch.stack(counts).numpy()
        return pairs

    def run(self, prompt: list[int], num_tokens: int, **options: Any) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens and the log-probabilities of each step, [num_tokens, vocab]. options: of `generate`."""
        found = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        logprobs = torch.cat(found.logits).log_softmax(-1)
        return found.sequences[0, len(prompt) :].tolist(), logprobs


def possible_ranks(logprobs: torch.Tensor, token: int, within: float = 1e-4) -> range:
    """Ranks that a token may have among float[vocab] log-probabilities that another computation may have moved."""
    sure, most = (int((logprobs >= logprobs[token] + shift).sum()) for shift in (within, -within))
    return range(max(1, sure), most + 1)


def prompts_of(lengths: list[int], vocab: int = 320) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(2, vocab, length).tolist() for length in lengths]
