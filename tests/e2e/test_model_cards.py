"""Models for embeddings as their cards use them: processes beside the cards' own lines of `transformers`."""

from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer, BatchEncoding

from tests.e2e.stack import Stack, worker_ports
from tests.model_cards import QUERY_PROMPT, write_bge, write_e5, write_gte, write_qwen3

Pool = Callable[[Tensor, Tensor], Tensor]  # hidden states [rows, tokens, hidden] and the mask, to [rows, hidden]


def first_token(states: Tensor, mask: Tensor) -> Tensor:
    return states[:, 0]


def mean_of_tokens(states: Tensor, mask: Tensor) -> Tensor:
    kept = states.masked_fill(~mask[..., None].bool(), 0.0)
    return kept.sum(dim=1) / mask.sum(dim=1)[..., None]


def last_token(states: Tensor, mask: Tensor) -> Tensor:
    assert bool((mask[:, -1] == 1).all()), "padding is on the left"
    return states[:, -1]


QUERY = "how are you?"
DOCUMENTS = ["I am fine, thank you.", "The quick brown fox jumps over the lazy dog; größer, naïve.", "a block of KV"]
CARDS: dict[str, tuple[Callable[[Path], Path], Pool, list[str]]] = {
    "BGE": (write_bge, first_token, [QUERY, *DOCUMENTS]),
    "E5": (write_e5, mean_of_tokens, [f"query: {QUERY}", *(f"passage: {text}" for text in DOCUMENTS)]),
    "GTE": (write_gte, first_token, [QUERY, *DOCUMENTS]),
    "Qwen3": (write_qwen3, last_token, [f"{QUERY_PROMPT}{QUERY}", *DOCUMENTS]),
}


def by_the_card(directory: Path, pool: Pool, texts: list[str]) -> list[list[float]]:
    """All texts in one padded batch, in float32."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    batch: BatchEncoding = tokenizer(
        texts, padding=True, return_tensors="pt", return_token_type_ids=False, return_attention_mask=True
    )
    with torch.inference_mode():
        states = model(**batch).last_hidden_state
    found: list[list[float]] = functional.normalize(pool(states, batch["attention_mask"]), dim=1).tolist()
    return found


def ask(stack: Stack, path: str, **fields: object) -> httpx2.Response:
    return httpx2.post(f"{stack.gateway.url}{path}", json={"model": "tiny", **fields}, timeout=120)


@pytest.mark.long
@pytest.mark.parametrize("card", CARDS)
def test_embeddings_are_those_of_the_model_card(card: str, tmp_path: Path):
    """And so are scores: the cosines of these. Cohere's types of input choose the prompts, where there are any."""
    write, pool, texts = CARDS[card]
    directory = write(tmp_path / "model")
    expected = by_the_card(directory, pool, texts)
    stack = Stack(directory, worker_ports(1, 0), [], None, kv_memory="16MiB" if card == "Qwen3" else "")
    with stack.running():
        answer = ask(stack, "/v1/embeddings", input=texts).json()
        for item, vector in zip(answer["data"], expected, strict=True):
            assert item["embedding"] == pytest.approx(vector, abs=1e-5)
        scores = ask(stack, "/v1/score", text_1=texts[0], text_2=texts[1:]).json()["data"]
        cosines = (torch.tensor(expected[1:]) @ torch.tensor(expected[0])).tolist()
        assert [score["score"] for score in scores] == pytest.approx(cosines, abs=1e-5)
        sides = (("search_query", [QUERY], expected[:1]), ("search_document", DOCUMENTS, expected[1:]))
        for input_type, plain, vectors in sides if card == "Qwen3" else ():
            typed = ask(stack, "/v2/embed", texts=plain, input_type=input_type)
            assert "x-baton-ignored-fields" not in typed.headers
            for found, vector in zip(typed.json()["embeddings"]["float"], vectors, strict=True):
                assert found == pytest.approx(vector, abs=1e-5)
        if card == "BGE":
            too_long = ask(stack, "/v1/embeddings", input="fox " * 70)
            assert (too_long.status_code, "64 tokens" in too_long.text) == (400, True)
            cut = ask(stack, "/v1/embeddings", input="fox " * 70, truncate_prompt_tokens=-1).json()["data"][0]
            assert cut["embedding"] == pytest.approx(by_the_card(directory, pool, ["fox " * 62])[0], abs=1e-5)
        stack.gateway.wait_for_baseline()
