"""The figures of `python -m loadtest quality`, of models that are rules, so that they can be said by hand."""

import json
import random
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.quality import intervals
from loadtest.quality.agreement import Agreement, Continued, equal_share
from loadtest.quality.asked import Skipped
from loadtest.quality.book import openings, paragraphs, passages
from loadtest.quality.formats import Formed, called, formed
from loadtest.quality.people import people, wishes
from loadtest.quality.perplexity import own_logprob
from loadtest.quality.recall import codes, context
from tests.checkpoints import write_checkpoint
from tests.gateway.tokenizer_files import CHATML, byte_level
from tests.loadtest.bench_server import serving
from tests.loadtest.scripted_model import ScriptedModel


class Pair:
    """Two models, and the lines that the command writes of them, by their measures."""

    def __init__(self, a: ScriptedModel, b: ScriptedModel, folder: Path) -> None:
        self._a, self._b, self._file = a, b, folder / "lines.json"

    def lines(self, *parts: str) -> dict[str, dict[str, Any]]:
        options = ["--model", self._a.url, "--against", self._b.url, "--json", str(self._file)]
        assert main(["quality", *options, "--parts", ",".join(parts)]) == 0
        return {line["measure"]: line for line in json.loads(self._file.read_text())}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda a, b: Pair(stack.enter_context(serving(a)), stack.enter_context(serving(b)), tmp_path)


def test_the_book_has_paragraphs_without_headings_or_broken_lines():
    text = "\n".join(paragraphs())
    assert len(text) > 50_000
    assert "CHAPTER" not in text
    assert "*" not in text
    assert "Caucus-Race" not in text  # a chapter's title; the story says Caucus-race
    assert paragraphs()[0].startswith("Alice was beginning to get very tired of sitting by her sister on the bank, and")
    assert all(len(passage) >= 1200 for passage in passages(1200))
    assert len(passages(1200)) > 30


def test_openings_are_the_whole_text_in_pieces_of_as_many_words():
    found = openings(200)
    assert " ".join(found).split() == " ".join(paragraphs()).split()
    lengths = [len(piece.split()) for piece in found]
    assert (len(found), max(lengths) - min(lengths)) == (200, 1)


@pytest.mark.parametrize(
    ("successes", "number", "expected"),
    [
        (0, 10, (0.0, 0.2775)),
        (5, 10, (0.2366, 0.7634)),
        (81, 263, (0.2553, 0.3662)),
    ],  # the last: Newcombe 1998, table I
)
def test_a_shares_interval_is_wilsons(successes: int, number: int, expected: tuple[float, float]):
    assert intervals.of_share(successes, number) == pytest.approx(expected, abs=1e-4)


def test_the_interval_of_a_difference_of_shares_is_of_pairs():
    """Where both fail at the same items, it is narrower than that of two samples; it is a point in no case."""
    a = [True] * 60 + [False] * 40
    b = [True] * 55 + [False] * 45
    low, high = intervals.of_share_difference(a, b)
    # By hand: 5.5 pairs lost and 0.5 won of 102; the variance is (6 - 25 / 102) / 102 ** 2.
    assert (low, high) == pytest.approx((-5 / 102 - 0.0460964, -5 / 102 + 0.0460964), abs=1e-6)
    low, high = intervals.of_share_difference(a, a)
    assert low == -high < 0


def test_a_means_interval_is_as_wide_as_that_of_a_normal_distribution():
    draw = random.Random(0)
    values = [draw.gauss(3.0, 2.0) for _ in range(400)]
    low, high = intervals.of_mean(values)
    half = 1.96 * statistics.stdev(values) / 20
    assert (low, high) == pytest.approx((statistics.mean(values) - half, statistics.mean(values) + half), abs=0.05)
    low, high = intervals.of_mean([1.0, 3.0], [3.0, 1.0])
    assert (low, high) == (1.0, 3.0)


def test_perplexity_is_the_number_of_choices(pair: Any):
    line = pair(ScriptedModel(choices=10), ScriptedModel(choices=12)).lines("perplexity")["perplexity"]
    assert (line["a"], line["b"]) == pytest.approx((10.0, 12.0))
    assert (line["difference"], line["low"], line["high"]) == pytest.approx((0.2, 0.2, 0.2))
    assert line["items"] == len(passages(1200))


def test_only_the_prompts_own_token_counts():
    assert own_logprob({"5": {"logprob": -0.5, "rank": 2}}) == -0.5
    with pytest.raises(ValueError, match="too many"):
        own_logprob({"5": {"logprob": -0.5}, "6": {"logprob": -0.1}})


@pytest.mark.parametrize(
    ("a", "b", "share"),
    [
        ((1, 2, 3, 4), (1, 2, 9, 4), 0.5),
        ((1, 2), (1, 2, 3, 4), 0.5),
        ((7,), (8,), 0.0),
        ((), (), 1.0),
        ((1,), (1,), 1.0),
    ],
)
def test_tokens_agree_until_the_first_difference(a: tuple[int, ...], b: tuple[int, ...], share: float):
    assert equal_share(a, b) == equal_share(b, a) == share


def test_agreement_is_of_answers_and_of_tokens(pair: Any):
    lines = pair(ScriptedModel(answer_words="one two three"), ScriptedModel(answer_words="one four")).lines("agreement")
    assert lines["answers equal"]["difference"] == 0.0
    assert lines["tokens before a difference"]["difference"] == pytest.approx(1 / 3)
    same = pair(ScriptedModel(), ScriptedModel()).lines("agreement")
    assert {line["difference"] for line in same.values()} == {1.0}
    assert {line["items"] for line in same.values()} == {200}


def test_models_of_different_tokens_have_no_agreement():
    with pytest.raises(Skipped, match="tokenize differently"):
        Agreement().compare([Continued((1,), (2,))], [Continued((3,), (2,))])


@pytest.mark.parametrize("num_chars", [4000, 150_000])
def test_planted_codes_are_spread_over_a_context(num_chars: int):
    planted = codes(10, seed=3)
    text = context(0.5, num_chars, planted)
    assert num_chars <= len(text) < 1.3 * num_chars + 1000
    places = [text.index(one.sentence) / len(text) for one in planted]
    assert [text.count(one.code) for one in planted] == [1] * 10
    assert places == sorted(places)
    assert max(b - a for a, b in zip([0.0, *places], [*places, 1.0], strict=True)) < 0.4


def test_recall_counts_the_codes_that_come_back(pair: Any):
    """A model that remembers the last half of its context alone finds half of the codes."""
    lines = pair(ScriptedModel(), ScriptedModel(memory_chars=5200)).lines("recall-2000")
    line = lines["codes recalled at 2000 tokens"]
    assert (line["items"], line["a"]) == (40, 1.0)
    assert 0.35 <= line["b"] <= 0.65
    assert line["low"] < line["difference"] < line["high"] < 0


def test_a_context_that_a_server_does_not_take_is_skipped_with_words(pair: Any):
    lines = pair(ScriptedModel(), ScriptedModel(max_model_len=8007)).lines("recall-8000")
    assert lines == {
        "recall-8000": {
            "measure": "recall-8000",
            "skipped": "B: max_model_len is 8007, and 8008 tokens are needed",
        }
    }


def test_json_is_valid_by_the_schema_and_right_by_what_it_says():
    (person,) = people(1)
    fields = person.model_dump()
    assert formed(json.dumps(fields), person) == Formed(valid=True, right=True)
    assert formed(json.dumps(fields | {"age": 17}), person) == Formed(valid=True, right=False)
    wrong = [fields | {"age": "17"}, fields | {"age": 200}, fields | {"more": 1}, {"name": "Mara"}]
    assert [formed(json.dumps(each), person).valid for each in wrong] == [False] * 4
    assert not formed("{", person).valid


def test_a_call_is_valid_by_its_tools_schema():
    alarm = wishes(1)[0]
    arguments = alarm.arguments.model_dump_json()
    assert called([{"name": "set_alarm", "arguments": arguments}], alarm) == Formed(valid=True, right=True)
    assert called([{"name": "get_weather", "arguments": '{"city": "Oslo"}'}], alarm) == Formed(valid=True, right=False)
    assert not called([{"name": "set_alarm", "arguments": '{"hour": 99, "minute": 1}'}], alarm).valid
    assert not called([{"name": "ring", "arguments": "{}"}], alarm).valid
    assert not called([], alarm).valid


def test_forms_are_asked_for_with_and_without_the_servers_help(pair: Any, capsys: pytest.CaptureFixture[str]):
    parts = ("json-words", "json-schema", "tools-auto", "tools-required")
    lines = pair(ScriptedModel(fenced=True), ScriptedModel(has_tools=False)).lines(*parts)
    assert [lines[f"JSON by {how}: right"]["a"] for how in ("words", "response_format")] == [1.0, 1.0]
    assert lines["tools-auto"]["skipped"] == (
        'B: /v1/chat/completions: status 400: {"error":{"message":"no tools\\nhere"}}'
    )
    assert "| tools-required" in capsys.readouterr().out
    both = pair(ScriptedModel(), ScriptedModel()).lines("tools-required")
    assert both["tool call, required: right"]["b"] == 1.0


def test_what_cannot_be_run_is_said(capsys: pytest.CaptureFixture[str]):
    url = "http://127.0.0.1:9"
    assert main(["quality", "--model", url, "--against", "demo", "--a-args=--quantization int8"]) == 2
    assert f"{url} runs already" in capsys.readouterr().err
    assert main(["quality", "--model", "http://10.0.0.1:80", "--against", "demo"]) == 2
    assert "on this machine only" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["quality", "--model", url, "--against", url, "--parts", "perplexity,speed"])
    assert "no part 'speed'" in capsys.readouterr().err


@pytest.mark.long
def test_a_model_agrees_with_itself_and_not_with_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`baton up` is started for each side, with the options that the side has, and is gone afterwards."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tokenizer = byte_level()
    size = max(tokenizer.get_vocab().values()) + 1
    for name, seed in (("one", 0), ("other", 1)):
        write_checkpoint(tmp_path / name, seed=seed, vocab_size=size, max_position_embeddings=4096)
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML, "eos_token": "<|eos|>"}
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(settings))
    small = "--device cpu --kv-memory 64MiB --num-threads 1 --max-model-len 4096"

    def lines(other: str) -> dict[str, dict[str, Any]]:
        options = ["--model", str(tmp_path / "one"), "--against", str(tmp_path / other), "--a-args", small]
        parts = "perplexity,agreement,recall-2000,recall-8000,json-schema"
        target = tmp_path / "lines.json"
        assert main(["quality", *options, "--b-args", small, "--parts", parts, "--json", str(target)]) == 0
        return {line["measure"]: line for line in json.loads(target.read_text())}

    same, different = lines("one"), lines("other")
    assert same["perplexity"]["a"] == pytest.approx(same["perplexity"]["b"])
    assert same["answers equal"]["difference"] > 0.9  # a step's other rows may change its rounding
    assert different["answers equal"]["difference"] < 0.1
    assert "max_model_len is 4096" in same["recall-8000"]["skipped"]
