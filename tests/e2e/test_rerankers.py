"""Scores of pairs through processes, beside the lines of `transformers` in model cards; no block is held afterwards."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, BatchEncoding

from tests.checkpoints import edit_json
from tests.e2e.conftest import clear_prompt, generate
from tests.e2e.stack import Stack, worker_ports
from tests.e2e.test_embeddings import expected
from tests.model_cards import QWEN3_RERANKER, write_bert_reranker, write_qwen3_reranker

QUERY = "How are you?"
DOCUMENTS = ["I am fine, thank you.", "The quick brown fox jumps over the lazy dog.", "a block of KV", "größer"]


def ask(stack: Stack, path: str, **fields: Any) -> Any:
    response = httpx2.post(f"{stack.gateway.url}{path}", json={"model": "tiny", **fields}, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def check_scores(stack: Stack, scores: list[float]) -> None:
    """That all endpoints give these, each document's by its index."""
    for path in ("/v1/rerank", "/v2/rerank"):
        results = ask(stack, path, query=QUERY, documents=DOCUMENTS)["results"]
        assert [result["index"] for result in results] == np.argsort(scores)[::-1].tolist()
        for result in results:
            assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-5)
    pairs = ask(stack, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    assert [pair["score"] for pair in pairs] == pytest.approx(scores, abs=1e-5)
    stack.gateway.wait_for_baseline()


@pytest.mark.long
def test_a_cross_encoder_of_bert_scores_as_its_card_says(tmp_path: Path):
    """With the types of tokens, in one padded batch."""
    directory = write_bert_reranker(tmp_path / "model")
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    batch: BatchEncoding = tokenizer([QUERY] * len(DOCUMENTS), DOCUMENTS, padding=True, return_tensors="pt")
    assert int(batch["token_type_ids"].max()) == 1
    with torch.inference_mode():
        scores = model(**batch).logits[:, 0].tolist()
    stack = Stack(directory, worker_ports(1, 0), [], None, kv_memory="")
    with stack.running():
        check_scores(stack, scores)


def yes_by_the_card(directory: Path) -> list[float]:
    """The probabilities of yes, by the lines of Qwen3-Reranker's card."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    task = "Given a web search query, retrieve relevant passages that answer the query"
    texts = [f"<Instruct>: {task}\n<Query>: {QUERY}\n<Document>: {document}" for document in DOCUMENTS]
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix))
    ids = [before + tokenizer.encode(text, add_special_tokens=False) + after for text in texts]
    batch = tokenizer.pad({"input_ids": ids}, padding=True, return_tensors="pt")
    no, yes = (tokenizer.convert_tokens_to_ids(token) for token in ("no", "yes"))
    with torch.inference_mode():
        logits = model(**batch).logits[:, -1, :]
        chosen = torch.nn.functional.log_softmax(torch.stack([logits[:, no], logits[:, yes]], dim=1), dim=1)
    found: list[float] = chosen[:, 1].exp().tolist()
    return found


@pytest.mark.long
def test_qwen3_reranker_scores_as_its_card_says(tmp_path: Path):
    directory = write_qwen3_reranker(tmp_path / "model")
    edit_json(directory / "config.json", drop=tuple(QWEN3_RERANKER), architectures=["Qwen3ForCausalLM"])
    scores = yes_by_the_card(directory)
    edit_json(directory / "config.json", **QWEN3_RERANKER)
    stack = Stack(directory, worker_ports(1, 0), [], None)
    with stack.running():
        check_scores(stack, scores)
        assert stack.gateway.metric("baton_cached_tokens_total") > 0, "the part before the document is cached"


@pytest.mark.long
def test_documents_are_ranked_beside_prompts_that_are_answered(stack: Stack):
    """By the same workers, at the same time: the cosines and the answers of `transformers`."""
    prompts = [clear_prompt(stack.model, 7000 + index, 40 + index, 12) for index in range(6)]
    ids = {text: _tokens(stack, text) for text in [QUERY, *DOCUMENTS]}
    query, *others = (expected(stack.model, ids[text]) for text in [QUERY, *DOCUMENTS])
    with ThreadPoolExecutor(12) as clients:
        asked = [clients.submit(_complete, stack, prompt) for prompt in prompts]
        ranked = [
            clients.submit(ask, stack, "/v1/score", text_1=QUERY, text_2=DOCUMENTS, cache_salt=str(index))
            for index in range(6)
        ]
        for one in ranked:
            found = [pair["score"] for pair in one.result()["data"]]
            assert found == pytest.approx([float(query @ other) for other in others], abs=1e-5)
        for one, prompt in zip(asked, prompts, strict=True):
            assert one.result() == generate(stack.model, prompt, 12).tokens
    stack.gateway.wait_for_baseline()


def _tokens(stack: Stack, text: str) -> list[int]:
    tokens: list[int] = ask(stack, "/tokenize", prompt=text)["tokens"]
    return tokens


def _complete(stack: Stack, prompt: list[int]) -> list[int]:
    fields = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    tokens: list[int] = ask(stack, "/v1/completions", **fields)["choices"][0]["token_ids"]
    return tokens
