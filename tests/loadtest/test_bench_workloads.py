"""Workloads: their lengths, what they share, and files of others' formats."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from loadtest.bench.lengths import Lengths, read_lengths
from loadtest.bench.prompts import Counter, TokenIds, Words
from loadtest.bench.script import Script
from loadtest.bench.settings import EndpointName, Settings, WorkloadName
from loadtest.bench.words import WORDS
from loadtest.bench.workloads.chosen import choose
from loadtest.bench.workloads.random_lengths import RandomLengths
from loadtest.bench.workloads.trace import Trace, read_trace
from loadtest.cannot_run import CannotRun

EIGHT = Lengths.fixed(8)


def scripts(seed: int = 0, **settings: Any) -> list[Script]:
    return list(choose(Settings(**settings)).workload.scripts(seed))


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("256", Lengths(256, 256)),
        ("100-400", Lengths(100, 400)),
        ("256~64", Lengths(1, 511, 64)),  # four deviations, as far above as below
        ("256~8", Lengths(224, 288, 8)),
        ("1~5", Lengths(1, 1)),
    ],
)
def test_a_length_is_read_as_it_is_written(text: str, lengths: Lengths) -> None:
    assert read_lengths(text, "--input") == lengths


@pytest.mark.parametrize("text", ["", "0", "-5", "9-3", "a", "1.5", "5~", "99999999999"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(CannotRun, match="--input"):
        read_lengths(text, "--input")


def test_lengths_are_spread_as_they_say() -> None:
    random = np.random.default_rng(1)
    uniform = [Lengths(10, 19).draw(random) for _ in range(5000)]
    assert {min(uniform), max(uniform)} == {10, 19}
    assert np.bincount(uniform)[10:].min() > 400
    normal = np.array([read_lengths("100~10", "").draw(random) for _ in range(5000)])
    assert normal.mean() == pytest.approx(100, abs=1)
    assert normal.std() == pytest.approx(10, abs=0.5)
    assert {EIGHT.draw(random) for _ in range(9)} == {8}
    assert [str(each) for each in (EIGHT, Lengths(1, 9), Lengths(1, 9, 2))] == ["8", "1-9", "5~2"]


def test_equal_seeds_give_equal_prompts_and_others_do_not() -> None:
    workload = RandomLengths(4, Lengths(5, 50), EIGHT)
    assert list(workload.scripts(1)) == list(workload.scripts(1)) != list(workload.scripts(2))
    assert list(workload.scripts([0, 1])) != list(workload.scripts([1, 1]))


@pytest.mark.parametrize("prompts", [TokenIds(500), Words()])
def test_members_of_a_group_share_its_prefix_and_nothing_else(prompts: TokenIds | Words) -> None:
    workload = RandomLengths(12, Lengths.fixed(6), EIGHT, prefix_tokens=10, groups=3, prompts=prompts)
    split = [script.turns[0].prompt for script in workload.scripts(0)]
    parts = [prompt.split() if isinstance(prompt, str) else prompt for prompt in split]
    assert {len(part) for part in parts} == {16}
    assert len({tuple(part[:10]) for part in parts}) == 3
    assert len({tuple(part[:10]) for part in parts[::3]}) == 1  # groups take turns
    assert len({tuple(part[10:]) for part in parts}) == 12


def test_groups_and_members_say_how_many_there_are() -> None:
    made = scripts(workload=WorkloadName.SHARED_PREFIX, groups=2, members=3, prefix=5, input="4")
    assert [len(script.turns[0].prompt) for script in made] == [9] * 6


def test_named_workloads_have_their_lengths_and_take_others() -> None:
    (first, *_), (other, *_) = (
        scripts(workload=WorkloadName.PREFILL),
        scripts(workload=WorkloadName.PREFILL, output="9"),
    )
    assert (len(first.turns[0].prompt), first.turns[0].output_tokens) == (462, 16)
    assert (len(other.turns[0].prompt), other.turns[0].output_tokens) == (462, 9)


def test_conversations_have_turns_of_words() -> None:
    made = scripts(workload=WorkloadName.CONVERSATIONS, requests=2, turns=3, input="5", pause=1.5)
    assert [len(script.turns) for script in made] == [3, 3]
    assert {len(str(turn.prompt).split()) for script in made for turn in script.turns} == {5}
    assert made[0].pause_s == 1.5


def test_structured_and_tools_ask_for_their_form(tmp_path: Path) -> None:
    (file := tmp_path / "schema.json").write_text('{"type": "string"}')
    (structured,) = scripts(workload=WorkloadName.STRUCTURED, requests=1, schema=file)
    assert structured.turns[0].fields["response_format"]["json_schema"]["schema"] == {"type": "string"}
    (tools,) = scripts(workload=WorkloadName.TOOLS, requests=1)
    assert tools.turns[0].fields["tool_choice"] == "required"
    assert len(tools.turns[0].fields["tools"]) == 2


# Files


def lines(file: Path, *entries: Any) -> Path:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


def entry(timestamp: float, input_length: int, output_length: int, *hash_ids: int) -> dict[str, Any]:
    found = {"timestamp": timestamp, "input_length": input_length, "output_length": output_length}
    return {**found, "hash_ids": list(hash_ids)} if hash_ids else found


def test_equal_hash_ids_are_equal_blocks(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "trace.jsonl",
        entry(3000, 25, 5, 0, 1, 2),
        entry(1000, 23, 6, 0, 1, 3),
        entry(1500, 14, 7, 0, 9),
        entry(2000, 12, 8),
        entry(2500, 30, 9, 0),  # more tokens than its blocks have
    )
    made = scripts(trace=file, trace_block=10, speed=2.0)
    assert [script.at_s for script in made] == [0, 0.25, 0.5, 0.75, 1.0]
    assert [script.turns[0].output_tokens for script in made] == [6, 7, 8, 9, 5]
    second, third, without, longer, first = (script.turns[0].prompt for script in made)
    assert [len(each) for each in (second, third, without, longer, first)] == [23, 14, 12, 30, 25]
    assert first[:20] == second[:20]
    assert first[20:23] != second[20:]
    assert third[:10] == longer[:10] == first[:10] != without[:10]
    assert third[10:] != first[10:14]


def test_a_block_that_ends_early_is_how_the_whole_one_begins(tmp_path: Path) -> None:
    file = lines(tmp_path / "trace.jsonl", entry(0, 20, 1, 4, 5), entry(0, 13, 1, 4, 5))
    for prompts in (TokenIds(), Words()):
        found, _ = read_trace(file, None, None)
        trace = Trace("trace", found, 0, 10, 1.0, prompts)
        whole, short = (script.turns[0].prompt for script in trace.scripts(0))
        assert whole[:13] == short if isinstance(whole, list) else str(whole).startswith(str(short))


def test_requests_of_a_trace_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    file = lines(tmp_path / "trace.jsonl", *(entry(n, 10 * n, 1) for n in range(1, 9)))
    workload = choose(Settings(trace=file, longest=41, requests=3)).workload
    assert workload.num_scripts == 3
    assert workload.name == "trace.jsonl, 4 longer requests left out"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"timestamp": 1, "input_length": 5}', "line 2: no timestamp, input_length and output_length"),
        ("[1]", "line 2: no timestamp"),
        ("{", "line 2: no timestamp"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 2: times are finite, lengths at least 1"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "hash ids not negative"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, words: str) -> None:
    (file := tmp_path / "trace.jsonl").write_text(json.dumps(entry(0, 1, 1)) + f"\n{line}\n")
    with pytest.raises(CannotRun, match=words):
        read_trace(file, None, None)


SHARED = {
    "conversations": [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "one two"},
        {"from": "gpt", "value": "a b c"},
        {"from": "human", "value": "three"},
        {"from": "gpt", "value": "d"},
    ]
}
OPENAI = {"messages": [{"role": "user", "content": "four"}, {"role": "assistant", "content": "e f"}]}
EMPTY = {"conversations": [{"from": "gpt", "value": "hello"}]}


@pytest.mark.parametrize("as_lines", [False, True])
def test_a_dataset_has_prompts_and_the_lengths_of_answers(tmp_path: Path, as_lines: bool) -> None:
    entries, file = [SHARED, OPENAI, EMPTY], tmp_path / "data.json"
    lines(file, *entries) if as_lines else file.write_text(json.dumps(entries))
    found = {(str(s.turns[0].prompt), s.turns[0].output_tokens) for s in scripts(dataset=file, requests=5)}
    assert found == {("one two", 3), ("four", 2)}
    turns = {tuple((str(turn.prompt), turn.output_tokens) for turn in s.turns) for s in scripts(dataset=file, turns=4)}
    assert turns == {(("one two", 3), ("three", 1)), (("four", 2),)}
    assert {s.turns[0].output_tokens for s in scripts(dataset=file, output="7")} == {7}
    assert {str(s.turns[0].prompt) for s in scripts(dataset=file, longest=3)} == {"four"}


def test_a_dataset_is_read_once(tmp_path: Path) -> None:
    """Not again at each step of a search."""
    workload = choose(Settings(dataset=(file := lines(tmp_path / "data.json", SHARED)), requests=2)).workload
    file.unlink()
    assert [len(list(workload.scripts(seed))) for seed in (1, 2)] == [2, 2]


def test_a_dataset_in_which_nothing_fits_is_refused(tmp_path: Path) -> None:
    file = lines(tmp_path / "data.json", OPENAI)
    with pytest.raises(CannotRun, match="no conversation has a prompt and an answer that fit"):
        choose(Settings(dataset=file, longest=2))
    with pytest.raises(CannotRun, match="it has no conversations of ShareGPT's format"):
        scripts(dataset=lines(tmp_path / "other.json", {"text": "a"}))


# Texts


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """One that has every third word of the list as a token, and letters for the rest."""
    vocabulary = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz?")}
    vocabulary |= {word: len(vocabulary) + number for number, word in enumerate(WORDS[::3]) if word not in vocabulary}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_gives_texts_their_lengths(tokenizer: Path) -> None:
    made = scripts(endpoint=EndpointName.TEXT, tokenizer=tokenizer, requests=3, input="40")
    counter = Counter(tokenizer)
    for script in made:
        assert isinstance(script.turns[0].prompt, str)
        assert counter.count(script.turns[0].prompt) == 40


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="there is no file"):
        Counter(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CannotRun, match="--tokenizer"):
        Counter(tmp_path)


def test_words_are_different_and_many() -> None:
    assert len(WORDS) == len(set(WORDS)) > 800
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


# What does not go together

RANDOM = Settings()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workload": WorkloadName.RANDOM, "trace": Path("t")}, "say one of them"),
        ({"turns": 3}, "--turns is not for the workload random, but for conversations, --dataset"),
        ({"workload": WorkloadName.SHARED_PREFIX, "requests": 3}, "--requests is not for the workload shared-prefix"),
        ({"trace": Path("t"), "input": "3"}, "--input is not for the workload --trace"),
        ({"dataset": Path("t"), "trace_block": 3}, "--trace-block is not for the workload --dataset, but for --trace"),
        ({"workload": WorkloadName.TOOLS, "endpoint": EndpointName.TEXT}, "the workload tools is of chats"),
        ({"workload": WorkloadName.CONVERSATIONS, "endpoint": EndpointName.TOKEN_IDS}, "conversations has texts"),
        ({"tokenizer": Path("t")}, "--tokenizer is for texts"),
        ({"endpoint": EndpointName.CHAT, "highest_token_id": 200}, "--highest-token-id is for token ids"),
        ({"dataset": Path("none.json")}, "none.json"),
        ({"workload": WorkloadName.STRUCTURED, "schema": Path("none.json")}, "--schema none.json"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(CannotRun, match=words):
        list(choose(replace(RANDOM, **settings)).workload.scripts(0))
