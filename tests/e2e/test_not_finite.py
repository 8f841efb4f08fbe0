"""A checkpoint in which one token's embedding is NaN, served by real processes: what clients see, and what goes on."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from services.config import Pooling
from tests.checkpoints import plant
from tests.e2e.conftest import clear_prompt, generate, prompt_of, write_model
from tests.e2e.stack import Stack, running_stack, wait_until

NAN = 3999
FAILED = "The server failed to answer this request."


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = write_model(tmp_path_factory.mktemp("damaged"), "llama", tie_word_embeddings=False)
    plant(directory, "model.embed_tokens.weight", NAN, float("nan"))
    with running_stack(directory, options=["--max-num-batched-tokens", "37"]) as running:
        yield running


def worker_ids(stack: Stack) -> set[str]:
    """The workers' lives."""
    return {worker["incarnation"] for worker in stack.gateway.ledger()["workers"]}


def assert_goes_on(stack: Stack, prompt: list[int]) -> None:
    """The prompt is answered as by `transformers`."""
    answer = stack.gateway.client.completions.create(
        model="tiny", prompt=prompt, max_tokens=6, temperature=0, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["token_ids"] == generate(stack.model, prompt, 6).tokens
    stack.gateway.wait_for_baseline()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("at", "settings"),
    [
        (0, {}),
        (60, {}),
        (119, {}),
        (60, {"max_tokens": 1}),
        (60, {"n": 3, "temperature": 1.0}),
        (119, {"logprobs": 2, "echo": True}),
        (119, {"logit_bias": {"7": -100}, "extra_body": {"allowed_token_ids": [7, 8]}}),
        (119, {"extra_body": {"structured_outputs": {"regex": "[ab]+"}}}),
    ],
    ids=str,
)
def test_the_request_fails_once_and_others_go_on(damaged: Stack, settings: dict[str, Any], at: int) -> None:
    """One attempt, an answer of 500 without the reason, and no other worker."""
    before, attempts = worker_ids(damaged), damaged.gateway.metric("baton_attempts_total")
    prompt = clear_prompt(damaged.model, 11, 120, 6)
    with pytest.raises(openai.InternalServerError) as error:
        damaged.gateway.client.completions.create(
            **{"model": "tiny", "prompt": [*prompt[:at], NAN, *prompt[at:]], "max_tokens": 9, **settings}
        )
    assert error.value.body == {"message": FAILED, "type": "server_error", "param": None, "code": "internal_error"}
    assert damaged.gateway.metric("baton_attempts_total") == attempts + 1
    assert_goes_on(damaged, prompt)
    assert worker_ids(damaged) == before


def test_a_stream_ends_in_an_error(damaged: Stack) -> None:
    with pytest.raises(openai.APIError, match=FAILED):
        for _ in damaged.gateway.client.completions.create(
            model="tiny", prompt=[*prompt_of(3, 50), NAN], max_tokens=9, stream=True
        ):
            pass


@pytest.mark.parametrize("pooling", Pooling)
def test_an_embedding_fails(damaged: Stack, pooling: Pooling) -> None:
    with pytest.raises(openai.InternalServerError, match=FAILED):
        damaged.gateway.client.embeddings.create(
            model="tiny", input=[[NAN, *prompt_of(4, 50)]], extra_body={"pooling": pooling.value}
        )
    gateway = damaged.gateway
    wait_until(lambda: gateway.metric("baton_worker_not_finite") >= 1, what="the worker's word of it")
    assert gateway.metric("baton_attempt_ends_total", reason="not_finite") >= 1
