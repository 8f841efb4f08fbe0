"""A trained model through the handoff: what it says and what it remembers is what `transformers` says and remembers.

The demo model in float32, from the same GGUF file on both sides.
"""

import functools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from loadtest.processes import free_ports
from services.launcher import demo_model
from services.protocol.model_files.open import open_model
from tests.e2e.corrupted import corrupt_reads
from tests.e2e.forked import BatonProcess
from tests.e2e.stack import Gateway
from tests.machine import miss

# Greedy answers to these have no near tie that rounding could decide: the least lead of a token is 0.03 in its logit.
CHATS = (
    "What is the capital of France?",
    "Name three fruits.",
    "What color is the sky?",
    "Who wrote Romeo and Juliet?",
    "What is 2 plus 3?",
    "What is water made of?",
)
SENTENCES = (
    "The river runs slowly past the old mill.",
    "A baker opens her shop before the sun is up.",
    "Children fly kites on the hill in autumn.",
    "The library keeps maps of every village nearby.",
    "Rain fell on the roofs for three days.",
    "A train leaves the station every hour.",
    "The gardener planted roses along the wall.",
    "Two cats sleep on the warm stones.",
    "The clock in the tower is always late.",
    "Fishermen mend their nets in the evening.",
)
NUM_SENTENCES = 82  # some 800 tokens
NUM_CODES = 4
BLOCK_SIZE = 16
CHAT_TOKENS, CODE_TOKENS = 24, 12
DECODE, DAMAGED_DECODE = 1, 2  # which port is whose


@dataclass(frozen=True)
class Planted:
    """A long text with a code somewhere in it, and the question for it."""

    code: str
    messages: list[dict[str, str]]


def planted(seed: int) -> Planted:
    choose = random.Random(seed)
    sentences = [choose.choice(SENTENCES) for _ in range(NUM_SENTENCES)]
    code = "".join(choose.choice("0123456789") for _ in range(5))
    sentences.insert(choose.randrange(NUM_SENTENCES), f"The secret code is {code}. Remember it.")
    text = " ".join(sentences)
    return Planted(code, [{"role": "user", "content": f"{text}\n\nWhat is the secret code?"}])


class Oracle:
    """The model as `transformers` reads it from the file."""

    def __init__(self, path: Path) -> None:
        torch.set_num_threads(1)  # more would spin against the workers'
        files = open_model(path)
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_buffer(files.tokenizer()))
        self.tokenizer.chat_template = files.chat_template()
        self._model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """The ids of a chat."""
        ids: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return ids

    def answer(self, messages: list[dict[str, str]], max_tokens: int) -> list[int]:
        """Its greedy tokens, the one that ends it included."""
        prompt = torch.tensor([self.prompt(messages)])
        mask = torch.ones_like(prompt)
        out = self._model.generate(prompt, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        tokens: list[int] = out[0, prompt.shape[1] :].tolist()
        return tokens

    def text(self, tokens: list[int]) -> str:
        """Without special tokens."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


@dataclass
class Pairs:
    """One prefill worker, and decode workers that read from it; a gateway for each pair."""

    path: Path
    ports: list[int] = field(default_factory=lambda: free_ports(3))
    workers: list[BatonProcess] = field(default_factory=list)
    gateways: list[Gateway] = field(default_factory=list)

    def start_worker(self, role: str, port: int, damage: tuple[int, int] | None = None) -> None:
        """damage: see `corrupt_reads`."""
        arguments = [role, "--model", str(self.path), "--port", str(port), "--device", "cpu", "--dtype", "float32"]
        limits = ["--num-threads", "1", "--kv-memory", "256MiB", "--max-num-batched-tokens", "1024"]
        prepare = None if damage is None else functools.partial(corrupt_reads, *damage)
        self.workers.append(BatonProcess([*arguments, *limits], prepare=prepare))

    def gateway(self, decode: int) -> Gateway:
        """A gateway that hands everything off to one decode worker."""
        workers = ",".join(f"127.0.0.1:{self.ports[index]}" for index in (0, decode))
        gateway = Gateway(self.path, ["--workers", workers, "--handoff", "always"])
        self.gateways.append(gateway)
        gateway.wait_for_workers(2)
        return gateway

    def end(self) -> None:
        for each in self.gateways:
            each.close()
        for worker in self.workers:
            worker.stop()


@pytest.fixture(scope="module")
def path() -> Path:
    """Without the wheel these tests are skipped; not in continuous integration, which must run them."""
    demo = demo_model.find()
    if not demo.is_random:
        return demo.path
    miss(f"the demo model is not installed: {demo_model.INSTALL}")


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle(path)


@pytest.fixture(scope="module")
def pairs(path: Path) -> Iterator[Pairs]:
    running = Pairs(path)
    try:
        running.start_worker("prefill", running.ports[0])
        running.start_worker("decode", running.ports[DECODE])
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def gateway(pairs: Pairs) -> Gateway:
    return pairs.gateway(DECODE)


def ask(gateway: Gateway, messages: list[dict[str, str]], max_tokens: int) -> Any:
    return gateway.client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=max_tokens, temperature=0
    )  # fmt: skip


def num_handed_off(gateway: Gateway) -> float:
    return gateway.metric("baton_handoffs_total", outcome="completed")


@pytest.mark.long
def test_chats_are_answered_as_by_transformers(gateway: Gateway, oracle: Oracle) -> None:
    before = num_handed_off(gateway)
    chats = [[{"role": "user", "content": text}] for text in CHATS]
    with ThreadPoolExecutor(len(chats)) as clients:
        answers = list(clients.map(lambda chat: ask(gateway, chat, CHAT_TOKENS), chats))
    for chat, answer in zip(chats, answers, strict=True):
        expected = oracle.answer(chat, CHAT_TOKENS)
        assert answer.choices[0].message.content == oracle.text(expected)
        assert answer.usage.prompt_tokens == len(oracle.prompt(chat))
        assert answer.usage.completion_tokens == len(expected)
    assert "Paris" in answers[0].choices[0].message.content
    assert num_handed_off(gateway) - before == len(chats)


@pytest.mark.long
def test_codes_in_long_prompts_are_recalled_through_the_handoff(gateway: Gateway, oracle: Oracle) -> None:
    """As many as `transformers` recalls, of those that it does recall."""
    before, num_recalled, seed = num_handed_off(gateway), 0, 0
    while num_recalled < NUM_CODES:
        text, seed = planted(seed), seed + 1
        assert seed < 3 * NUM_CODES, "the model recalls too little to say anything"
        with ThreadPoolExecutor(1) as client:  # both at once, where there are cores for it
            asked = client.submit(ask, gateway, text.messages, CODE_TOKENS)
            expected = oracle.text(oracle.answer(text.messages, CODE_TOKENS))
        answer = asked.result()
        assert answer.choices[0].message.content == expected
        assert answer.usage.prompt_tokens > 750
        num_recalled += text.code in expected
    assert num_handed_off(gateway) - before == seed


@pytest.mark.long
def test_damaged_blocks_are_noticed_as_a_wrong_recall(pairs: Pairs, oracle: Oracle) -> None:
    """Else the test before would prove nothing. After all checks, the blocks of the code hold something else."""
    text = planted(0)
    ids = oracle.prompt(text.messages)
    pieces = [oracle.text([token]) for token in ids]
    first = next(index for index in range(len(ids)) if "".join(pieces[index : index + 5]) == text.code)
    blocks = (first // BLOCK_SIZE, (first + 4) // BLOCK_SIZE + 1)
    pairs.start_worker("decode", pairs.ports[DAMAGED_DECODE], damage=blocks)
    answer = ask(pairs.gateway(DAMAGED_DECODE), text.messages, CODE_TOKENS)
    assert text.code not in answer.choices[0].message.content
    assert text.code in oracle.text(oracle.answer(text.messages, CODE_TOKENS))
