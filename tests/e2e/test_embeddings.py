"""Embeddings through real processes: the hidden states of `transformers`, and nothing left behind."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import openai
import pytest
import torch

from protos import inference_pb2, inference_pb2_grpc
from services.config import Pooling
from tests.e2e.conftest import oracle, prompt_of
from tests.e2e.stack import Gateway, Stack, running_stack, wait_until


def expected(model: Path, prompt: list[int], pooling: Pooling = Pooling.LAST) -> np.ndarray:
    """The normalized embedding by its definition."""
    with torch.inference_mode():
        states = oracle(model).base_model(torch.tensor([prompt])).last_hidden_state[0].double()
    pooled = {Pooling.LAST: states[-1], Pooling.MEAN: states.mean(dim=0), Pooling.CLS: states[0]}[pooling]
    unit: np.ndarray = (pooled / pooled.norm()).numpy()
    return unit


def embed(gateway: Gateway, prompts: list[list[int]], pooling: Pooling = Pooling.LAST) -> list[list[float]]:
    """By the official client, which asks for base64."""
    answer = gateway.client.embeddings.create(model="tiny", input=prompts, extra_body={"pooling": pooling.value})
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert [item.index for item in answer.data] == list(range(len(prompts)))
    return [item.embedding for item in answer.data]


@pytest.mark.parametrize("pooling", Pooling)
def test_embeddings_are_those_of_transformers(stack: Stack, pooling: Pooling):
    """In odd chunks, and again where the prompts are cached."""
    prompts = [prompt_of(900 + length, length) for length in (1, 16, 50, 150)]
    for _ in range(2):
        for found, prompt in zip(embed(stack.gateway, prompts, pooling), prompts, strict=True):
            assert np.abs(np.array(found) - expected(stack.model, prompt, pooling)).max() < 1e-5
    stack.gateway.wait_for_baseline()
    assert stack.gateway.metric("baton_requests_total", endpoint="embeddings", status="200") >= 2
    assert stack.gateway.metric("baton_plans_total", plan="prefill", why="embedding") >= 8


def test_a_large_batch_comes_back_in_order(stack: Stack):
    prompts = [prompt_of(2000 + index, 5 + index % 7) for index in range(300)]
    found = embed(stack.gateway, prompts)
    for index in (0, 1, 128, 299):
        assert np.abs(np.array(found[index]) - expected(stack.model, prompts[index])).max() < 1e-5
    stack.gateway.wait_for_baseline()


def test_grpc_has_the_same_embeddings(stack: Stack):
    prompts = [prompt_of(3000, 20), prompt_of(3001, 3)]
    with grpc.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}") as channel:
        request = inference_pb2.EmbedRequest(inputs=[{"token_ids": {"ids": prompt}} for prompt in prompts])
        answer = inference_pb2_grpc.InferenceStub(channel).Embed(request, timeout=120)
    found = [np.array(embedding.values) for embedding in answer.embeddings]
    for embedding, other in zip(found, embed(stack.gateway, prompts), strict=True):
        assert np.abs(embedding - np.array(other)).max() < 1e-6


def test_an_embedding_finds_its_prompt_in_caches_by_its_own_salt_alone(stack: Stack):
    prompt = prompt_of(3100, 50)

    def cached(salt: str) -> int:
        request = inference_pb2.EmbedRequest(inputs=[{"token_ids": {"ids": prompt}}], cache_salt=salt, priority=-1)
        with grpc.insecure_channel(f"127.0.0.1:{stack.gateway.grpc_port}") as channel:
            answer = inference_pb2_grpc.InferenceStub(channel).Embed(request, timeout=120)
        assert np.abs(np.array(answer.embeddings[0].values) - expected(stack.model, prompt)).max() < 1e-5
        stack.gateway.wait_for_baseline()
        return int(answer.usage.cached_tokens)

    assert [cached(salt) for salt in ("a", "b", "")] == [0, 0, 0]
    assert all(cached(salt) >= 16 for salt in ("a", "b", ""))


def test_the_option_says_how_to_pool(stack: Stack):
    prompt = prompt_of(4000, 30)
    with stack.serving("--pooling", "mean") as gateway:
        found = gateway.client.embeddings.create(model="tiny", input=prompt).data[0].embedding
    assert np.abs(np.array(found) - expected(stack.model, prompt, Pooling.MEAN)).max() < 1e-5


@pytest.mark.long
def test_embeddings_outlive_their_worker(llama: Path):
    """A prefill worker is killed under some requests for embeddings; the other one makes them."""
    prompts = [[prompt_of(5000 + 100 * number + index, 120) for index in range(8)] for number in range(6)]
    with running_stack(llama, prefill=2, options=["--max-num-batched-tokens", "16"]) as stack:
        with ThreadPoolExecutor(6) as clients:
            stack.workers["prefill-0"].freeze()  # what it is given stays under way there
            asked = [clients.submit(embed, stack.gateway, some) for some in prompts]
            address = f"127.0.0.1:{stack.ports['prefill-0']}"
            wait_until(lambda: any(row["prefill"] == address for row in stack.gateway.ledger()["rows"]), what="work")
            stack.workers["prefill-0"].kill()
            answers = [each.result() for each in asked]
        for some, found in zip(prompts, answers, strict=True):
            assert np.abs(np.array(found[-1]) - expected(llama, some[-1])).max() < 1e-5
        assert stack.gateway.metric("baton_attempt_ends_total", reason="worker_lost") > 0
        stack.gateway.wait_for_workers(2)
        stack.gateway.wait_for_baseline()
        stack.workers["prefill-1"].kill()
        stack.gateway.wait_for_workers(1)  # a request that went to the dead one would wait for another
        with pytest.raises(openai.InternalServerError, match="prefill workers"):
            embed(stack.gateway, [[5, 6, 7]])
