"""Through HTTP, prefill, a NIXL handoff and decode: the tokens of `transformers`, and nothing left behind."""

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest
from tokenizers import Tokenizer

from services.engine.kernels.cpu.isa import this_isa
from tests.e2e.conftest import clear_prompt, generate, prompt_of, write_model
from tests.e2e.stack import Gateway, Stack, running_stack, wait_until
from tests.pace import STEP_S

IDLE_S = 4.0  # that are watched
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


def text_of(model: Path, tokens: list[int]) -> str:
    """What the client sees: an incomplete character at the end is not sent."""
    return Tokenizer.from_file(str(model / "tokenizer.json")).decode(tokens).rstrip("\ufffd")


T = TypeVar("T")


def num_handed_off(gateway: Gateway) -> float:
    return gateway.metric("baton_handoffs_total", outcome="completed")


def until_handed_off(gateway: Gateway, number: int, run: Callable[[], T]) -> T:
    """What `run` returns, once all of its `number` requests were handed off.

    Where the machine stalls for seconds, decode avoids prefill for a moment and serves alone, or nobody is connected.
    """
    for _ in range(6):
        before = num_handed_off(gateway)
        try:
            answer = run()
        except openai.InternalServerError as error:
            if error.status_code != 503:
                raise
        else:
            if num_handed_off(gateway) - before == number:
                return answer
        time.sleep(2)
    raise AssertionError("not every request was handed off, six times")


def check_parity(gateway: Gateway, model: Path) -> None:
    """In a mixed batch, and then alone with prefix hits."""
    prompts = [clear_prompt(model, seed, length, 24) for seed, length in enumerate((1, 15, 16, 17, 60, 100))]

    def complete(prompt: list[int]) -> openai.types.Completion:
        answer: openai.types.Completion = gateway.client.completions.create(
            prompt=prompt, max_tokens=24, logprobs=1, **GREEDY
        )
        return answer

    with ThreadPoolExecutor(6) as pool:
        answers = until_handed_off(gateway, len(prompts), lambda: list(pool.map(complete, prompts)))
    again = [until_handed_off(gateway, 1, partial(complete, prompt)) for prompt in prompts]
    for prompt, *completions in zip(prompts, answers, again, strict=True):
        expected = generate(model, prompt, 24)
        for completion in completions:
            choice = completion.choices[0]
            assert choice.text.rstrip("\ufffd") == text_of(model, expected.tokens)
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    gateway.wait_for_baseline()


def test_llama_equals_transformers_with_every_request_handed_off(stack: Stack, llama: Path):
    check_parity(stack.gateway, llama)


def test_what_computes_the_workers_steps_is_visible(stack: Stack):
    isa = this_isa()
    kernels = "torch" if isa is None else isa.name
    assert [worker["kernels"] for worker in stack.gateway.ledger()["workers"]] == [kernels] * 2
    assert stack.gateway.metric("baton_worker_info", kernels=kernels) == 2
    assert stack.gateway.metric("baton_worker_info") == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        pytest.param("qwen3", {"num_key_value_heads": 1, "head_dim": 32}, marks=pytest.mark.long),
        ("mistral", {"sliding_window": 24}),
        pytest.param("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}, marks=pytest.mark.long),
        pytest.param("deepseek_v2", {"q_lora_rank": None}, marks=pytest.mark.long),
    ],
)
def test_other_families_equal_transformers_with_every_request_handed_off(
    family: str, shape: dict[str, Any], tmp_path: Path
):
    model = write_model(tmp_path / "model", family, **shape)
    with running_stack(model, options=["--max-num-batched-tokens", "37"]) as stack:
        check_parity(stack.gateway, model)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["nixl", "grpc"])
def test_latents_move_as_one_plane_of_one_head(transport: str, tmp_path: Path):
    """With a handoff moved in blocks of so many bytes, which are told for each token."""
    model = write_model(tmp_path / "model", "deepseek_v3")
    with running_stack(model, options=["--max-num-batched-tokens", "64", "--transport", transport]) as stack:
        check_parity(stack.gateway, model)
        token_bytes = 2 * (24 + 8) * 4  # layers, latent and rope, float32
        assert [worker["kv_token_bytes"] for worker in stack.gateway.ledger()["workers"]] == [token_bytes] * 2
        moved = stack.gateway.metric("baton_kv_bytes_moved_total")
        assert moved > 0
        assert moved % (16 * token_bytes) == 0


@pytest.mark.long
@pytest.mark.parametrize("transport", ["nixl", "grpc"])
def test_of_layers_with_a_window_the_last_blocks_move(transport: str, tmp_path: Path):
    """One layer sees all, six see 20 tokens: what lies further back of these is computed, and stays."""
    model = write_model(tmp_path / "model", "gemma3", num_hidden_layers=7, sliding_window=20)
    options = ["--max-num-batched-tokens", "37", "--transport", transport]
    with running_stack(model, options=options) as stack:
        check_parity(stack.gateway, model)
        layer_bytes = 2 * 2 * 16 * 16 * 4  # K and V, heads, head dim, positions, float32
        assert [worker["kv_token_bytes"] for worker in stack.gateway.ledger()["workers"]] == [7 * layer_bytes // 16] * 2
        seeds = count(70)

        def moved() -> float:
            before = stack.gateway.moved_bytes()
            prompt = clear_prompt(model, next(seeds), 150, 4)
            stack.gateway.client.completions.create(prompt=prompt, max_tokens=4, **GREEDY)
            return stack.gateway.moved_bytes() - before

        assert until_handed_off(stack.gateway, 1, moved) == (10 + 6 * (10 - (150 - 20 + 1) // 16)) * layer_bytes


@pytest.mark.long
@pytest.mark.parametrize("transport", ["nixl", "grpc"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_kv_in_one_byte_gives_the_same_text_with_and_without_handoff(kind: str, transport: str, tmp_path: Path):
    """Greedy and drawn, of cached prompts too. A token has 16 codes and a scale for each plane of a head."""
    model, token_bytes = write_model(tmp_path / "model", "llama"), 2 * 2 * 2 * (16 + 4)
    options = ["--kv-cache-dtype", kind, "--max-num-batched-tokens", "37", "--transport", transport]
    with running_stack(model, options=options) as stack, stack.serving("--handoff", "never") as alone:
        assert [worker["kv_token_bytes"] for worker in stack.gateway.ledger()["workers"]] == [token_bytes] * 2

        def text(gateway: Gateway, seed: int, temperature: float) -> str:
            chosen = {"max_tokens": 30, "temperature": temperature, "seed": seed}
            answer = gateway.client.completions.create(model="tiny", prompt=prompt_of(seed, 61), **chosen)
            found: str = answer.choices[0].text
            return found

        for seed, temperature in product((1, 2, 3), (0.0, 0.9)):
            handed_off = until_handed_off(stack.gateway, 1, partial(text, stack.gateway, seed, temperature))
            assert handed_off == text(alone, seed, temperature)
        assert alone.metric("baton_handoffs_total") == 0
        stack.gateway.wait_for_baseline()
        time.sleep(1.1)  # the last load report carries the bytes moved
        moved = stack.gateway.metric("baton_kv_bytes_moved_total")
        assert moved > 0
        assert moved % (16 * token_bytes) == 0


@pytest.mark.long
def test_the_same_seed_gives_the_same_text_with_and_without_handoff(stack: Stack):
    with stack.serving("--handoff", "never") as alone:
        for seed in (1, 2, 3):
            texts = [
                each.client.completions.create(
                    model="tiny", prompt=prompt_of(seed, 40), max_tokens=30, temperature=0.9, top_p=0.9, seed=seed
                )
                .choices[0]
                .text
                for each in (stack.gateway, alone)
            ]
            assert texts[0] == texts[1]
        assert alone.metric("baton_handoffs_total") == 0


def test_the_next_turn_finds_its_blocks_on_both_workers_and_moves_only_the_rest(stack: Stack, llama: Path):
    gateway, prompt_len, num_tokens, block_size = stack.gateway, 77, 40, 16
    seeds = count(50)

    def two_turns() -> tuple[int, float]:
        """Cached tokens and bytes moved of the second."""
        prompt = clear_prompt(llama, next(seeds), prompt_len, num_tokens)
        gateway.client.completions.create(prompt=prompt, max_tokens=num_tokens, **GREEDY)
        turn = prompt + generate(llama, prompt, num_tokens).tokens + prompt_of(49, 30)
        before = gateway.moved_bytes()
        answer = gateway.client.completions.create(prompt=turn, max_tokens=2, **GREEDY)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        moved = gateway.moved_bytes() - before
        return answer.usage.prompt_tokens_details.cached_tokens or 0, moved

    cached_tokens, moved = until_handed_off(gateway, 2, two_turns)
    assert cached_tokens == prompt_len // block_size * block_size
    block_bytes = 2 * 2 * 2 * 16 * block_size * 4  # layers, heads, K and V, head dim, positions, float32
    held = (prompt_len + num_tokens - 1) // block_size
    assert moved == (-(-(prompt_len + num_tokens + 30) // block_size) - held) * block_bytes


def test_prompts_together_over_one_cold_prefix_compute_and_move_it_once(stack: Stack):
    gateway, prefix = stack.gateway, prompt_of(60, 160)
    moved_before = gateway.moved_bytes()
    handed_off_before = num_handed_off(gateway)

    def cached(index: int) -> int:
        answer = gateway.client.completions.create(prompt=[*prefix, 100 + index], max_tokens=4, **GREEDY)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    with ThreadPoolExecutor(32) as pool:
        assert sorted(pool.map(cached, range(32))) == [0] + [160] * 31
    moved = gateway.moved_bytes() - moved_before
    handed_off = num_handed_off(gateway) - handed_off_before
    assert handed_off > 20  # all, unless a stalled machine makes one worker avoid the other for a moment
    assert moved == (160 // 16 + handed_off) * (2 * 2 * 2 * 16 * 16 * 4)


@pytest.mark.few(1)
@pytest.mark.parametrize("stream", [True, False])
async def test_blocks_are_back_when_the_client_is_gone(stack: Stack, stream: bool):
    """Long before the answer would have ended, or three times in a row the machine has stalled just then."""
    gateway, took = stack.gateway, list[tuple[float, float]]()
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        for _ in range(3):
            start = time.monotonic()
            gateway.client.completions.create(prompt=prompt_of(69, 100), max_tokens=390, **GREEDY)
            undisturbed_s = time.monotonic() - start
            call = asyncio.create_task(
                client.completions.create(prompt=prompt_of(70, 100), max_tokens=390, stream=stream, **GREEDY)
            )
            await asyncio.to_thread(wait_until, lambda: bool(gateway.ledger()["rows"]), 30, "the request")
            if stream:
                answer = await call
                assert isinstance(answer, openai.AsyncStream)
                await anext(aiter(answer))
                await answer.close()
            else:
                call.cancel()
            took.append((await asyncio.to_thread(gateway.wait_for_baseline), undisturbed_s))
            if took[-1][0] < undisturbed_s / 2:
                break
    assert took[-1][0] < took[-1][1] / 2, f"blocks were back, and whole answers, after {took} s"


def test_a_streamed_chat_and_an_error_through_the_official_client(stack: Stack):
    client = stack.gateway.client
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].usage is not None
    assert 1 <= chunks[-1].usage.completion_tokens <= 12
    assert chunks[0].choices[0].delta.role == "assistant"
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "Hello"}])
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt=prompt_of(1, 600))
    assert error.value.code == "context_length_exceeded"
    stack.gateway.wait_for_baseline()


def thread_times(pid: int) -> dict[int, tuple[int, float]]:
    """Of each thread of a process, so far: how often it went to sleep, and its CPU seconds."""
    times = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        sleeps = int((task / "status").read_text().split("voluntary_ctxt_switches:")[1].split()[0])
        user, system = (task / "stat").read_text().rpartition(")")[2].split()[11:13]
        times[int(task.name)] = sleeps, (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return times


def test_an_idle_stack_sleeps(stack: Stack):
    """Under 1 % of a core for each process. Counted in wake-ups, since a busy machine's CPU times tell little.

    A wake-up costs some 30 µs; the transfer thread alone has 50 a second. A thread that spins has none, but takes all
    of a core.
    """
    stack.gateway.wait_for_baseline()
    pids = {name: process.pid for name, process in stack.workers.items()} | {"gateway": stack.gateway.process.pid}
    time.sleep(1)
    began = time.monotonic()
    before = {name: thread_times(pid) for name, pid in pids.items()}
    time.sleep(IDLE_S)
    now = {name: thread_times(pid) for name, pid in pids.items()}
    elapsed_s = time.monotonic() - began  # which a busy machine makes longer
    for name, after in now.items():
        spent = [(after[t][0] - old[0], after[t][1] - old[1]) for t, old in before[name].items() if t in after]
        rate = sum(sleeps for sleeps, _ in spent) / elapsed_s
        share = sum(cpu_s for _, cpu_s in spent) / elapsed_s
        print(f"idle {name}: {rate:.0f} wake-ups a second, {share:.1%} of a core")
        assert rate < 150
        assert max(cpu_s for _, cpu_s in spent) < 0.4 * elapsed_s


@pytest.mark.long
def test_requests_end_when_their_deadline_passes(stack: Stack):
    with stack.serving("--request-timeout", f"{100 * STEP_S}") as hasty:
        with pytest.raises(openai.APIStatusError) as error:
            hasty.client.completions.create(prompt=prompt_of(1, 50), max_tokens=400, **GREEDY)
        assert error.value.status_code == 504
        hasty.wait_for_baseline()
