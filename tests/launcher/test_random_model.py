"""The random model: always the same, whole or not there, and lively enough to look at."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.launcher import random_model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("cache") / "demo"
    random_model.make(target)
    return target


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_two_makers_at_once_leave_one_whole_model_and_nothing_else(made: Path, tmp_path: Path) -> None:
    target = tmp_path / "demo"
    with ThreadPoolExecutor(2) as makers:
        list(makers.map(random_model.make, [target, target]))
    assert random_model.exists(target)
    assert digests(target) == digests(made)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_its_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert random_model.directory().is_relative_to(tmp_path)
    assert not random_model.exists(random_model.directory())


def test_its_tokenizer_gives_back_any_text(made: Path) -> None:
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    text = "Grüße, 世界! 🎌 \t x == 1\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_its_greedy_answers_are_lively(made: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    chat = [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert len(set(answer[0, -64:].tolist())) >= 40
