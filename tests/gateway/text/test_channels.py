"""Answers in channels, told apart: golden outputs, however they are cut, and whatever else a model writes."""

import json
import random
import time
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.text.detokenizer import make_detokenizer
from services.gateway.text.model_output.channel_marks import ALL, END, MARKS, are_spelled, as_marks, mark_tokens
from services.gateway.text.model_output.channels import ChannelAnswer, Channels, begun_message
from services.gateway.text.model_output.forms import HARMONY, NONE, find_forms
from services.gateway.text.model_output.json_calls import CallPart
from services.gateway.text.model_output.told import NOTHING
from services.gateway.text.tokenizer import Tokenizer
from tests.gateway.text.test_model_output import Calls, Parts, cuts
from tests.gateway.tokenizer_files import byte_level, sentencepiece

SCHEMAS: dict[str, dict[str, object]] = {"f": {}, "g": {}, "web-search": {}}
HARD = r'{"a": "x}\"]", "b": [1, {"c": null}], "größe": "日本 🙂", "d": "<tool_call>"}'
ANALYSIS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>{}<|return|>"
CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
ROLE_CALL = " to=functions.{}<|channel|>commentary json<|message|>{}<|call|>"
BOTH = Channels()


def told(pieces: Iterable[str], channels: Channels = BOTH, begun: str = "", *, cut: bool = False) -> Parts:
    answer = ChannelAnswer(channels, begun, SCHEMAS, spelled=True)
    parts, calls = Parts("", "", []), list[list[str]]()
    for each in [*map(answer.feed, pieces), answer.finish(cut=cut)]:
        parts.content += each.content
        parts.reasoning += each.reasoning
        for number, name, arguments in each.calls:
            if name is not None:
                assert (number, arguments) == (len(calls), "")
                calls.append([name, ""])
            calls[number][1] += arguments
    assert answer.num_calls == len(calls) or cut
    parts.calls = [(name, arguments) for name, arguments in calls]
    return parts


GOLDEN: list[tuple[str, str, str, Calls]] = [
    (ANALYSIS.format("hm < x") + FINAL.format("2 + 2 = 4.\n"), "2 + 2 = 4.\n", "hm < x", []),
    (FINAL.format("Code:\n    x\n\n\t "), "Code:\n    x\n\n\t ", "", []),
    ("<|channel|>final <|constrain|>json<|message|>[1]", "[1]", "", []),
    (ANALYSIS.format("a") + CALL.format("f", HARD), "", "a", [("f", HARD)]),
    (ANALYSIS.format("a") + ROLE_CALL.format("web-search", "{}"), "", "a", [("web-search", "{}")]),
    (CALL.replace(" <|cons", "<|cons").format("f", '{"a":1}'), "", "", [("f", '{"a":1}')]),
    ("<|channel|>commentary to=functions.f<|message|>{}<|call|>", "", "", [("f", "{}")]),
    ("<|channel|>commentary to=f code<|message|>{}<|call|>", "", "", [("f", "{}")]),
    ("<|channel|>analysis to=functions.f<|message|>{}<|call|>", "", "", [("f", "{}")]),
    # Several messages of one kind, calls among them; a call after the final text.
    (ANALYSIS.format("a") + ANALYSIS.format("b") + FINAL.format("c"), "c", "a\n\nb", []),
    (
        "<|channel|>commentary<|message|>Plan.<|end|><|start|>assistant"
        + CALL.format("f", "{}")
        + "<|start|>assistant"
        + ROLE_CALL.format("g", '{"n": 2}')
        + "<|start|>assistant"
        + FINAL.format("Done."),
        "Plan.\n\nDone.",
        "",
        [("f", "{}"), ("g", '{"n": 2}')],
    ),
    (FINAL.format("A") + "<|start|>assistant" + CALL.format("f", '{"x": ""}'), "A", "", [("f", '{"x": ""}')]),
    # Calls without arguments, or of another form.
    (CALL.format("f", ""), "", "", [("f", "{}")]),
    (CALL.format("f", " \n"), "", "", [("f", "{}")]),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|call|>", "", "", [("f", "{}")]),
    (CALL.format("f", "no JSON"), "no JSON", "", []),
    (CALL.format("f", '{"a": 1}{"b": 2}'), '{"b": 2}', "", [("f", '{"a": 1}')]),
    (CALL.format("f", '{"a": tru'), "", "", [("f", '{"a": tru')]),
    ("<|channel|>commentary to=functions.<|message|>x", "x", "", []),
    ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "", "print(1)", []),
    # Headers that are none, or odd.
    ("Hello world", "Hello world", "", []),
    ("to=day it rains", "to=day it rains", "", []),
    ("assistants help", "assistants help", "", []),
    (" assistant", " assistant", "", []),
    ("<|message|>Hi<|end|>", "Hi", "", []),
    ("<|channel|>analysis We think\nso.<|end|><|start|>assistant" + FINAL.format("x"), "x", "We think\nso.", []),
    ("<|channel|>analysis" + " word" * 60 + "<|end|>", "", ("word " * 60).strip(), []),
    ("<|channel|>bash<|channel|>commentary to=functions.f<|message|>{}<|call|>", "", "", [("f", "{}")]),
    ("<|constrain|>final<|message|>x", "x", "", []),
    ("<|channel|>thoughts<|message|>x", "x", "", []),
    ("––commentary x", "––commentary x", "", []),
    ("<|start|>assistant" + FINAL.format("x"), "x", "", []),
    ("<|start|>Hello you", "Hello you", "", []),
    # Ends that are missing, and what comes after one.
    ("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", "b", "a", []),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "b", "a", []),
    (FINAL.format("a") + " \nb", "a\n\nb", "", []),
    (FINAL.format("a") + "<|message|>b<|end|><|end|><|call|>", "a\n\nb", "", []),
    ("<|channel|>final<|message|>a<|constrain|>b<|message|>c", "abc", "", []),
    # Messages that are not the assistant's.
    (
        FINAL.format("a") + "<|start|>user<|message|>More?<|end|><|start|>assistant" + FINAL.format("b"),
        "a\n\nb",
        "",
        [],
    ),
    (
        CALL.format("f", "{}") + "<|start|>functions.f to=assistant<|channel|>commentary<|message|>5<|end|>",
        "",
        "",
        [("f", "{}")],
    ),
    ("<|channel|>ana", "", "", []),
    ("<|channel|>commentary to=functions.f", "", "", [("f", "{}")]),
    ("<|cha", "<|cha", "", []),
    ("", "", "", []),
]


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), GOLDEN)
def test_pieces_join_to_the_whole(text: str, content: str, reasoning: str, calls: Calls) -> None:
    for pieces in cuts(text):
        assert told(pieces) == Parts(content, reasoning, calls), pieces


def test_an_answer_that_was_cut_has_what_came() -> None:
    assert told(["<|channel|>commentary to=functions.f"], cut=True) == Parts("", "", [])
    assert told([CALL.removesuffix("<|call|>").format("f", "")], cut=True) == Parts("", "", [])
    assert told([CALL.removesuffix("<|call|>").format("f", '{"a": "b')], cut=True).calls == [("f", '{"a": "b')]
    assert told(["<|channel|>analysis<|message|>a"], cut=True) == Parts("", "a", [])


def test_parts_that_are_not_told_apart_are_content() -> None:
    text = ANALYSIS.format("a") + CALL.format("f", "{}")
    assert told([text], Channels(calls=False)) == Parts("{}", "a", [])
    assert told([text], Channels(reasoning=False)) == Parts("a", "", [("f", "{}")])
    assert told([text], Channels(calls=False, reasoning=False)) == Parts("a\n\n{}", "", [])


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", ""),
        ("<|start|>assistant<|channel|>final<|message|>A<|end|><|start|>assistant", ""),
        ("<|start|>assistant<|channel|>final<|message|>A", "<|channel|>final<|message|>A"),
        ("Hi", ""),
    ],
)
def test_the_prompt_may_have_begun_the_message(prompt: str, begun: str) -> None:
    assert begun_message(prompt) == begun
    expected = "\nB" if begun else "B"
    assert told(["\nB"] if begun else [FINAL.format("B")], begun=begun).content == expected


def test_copies_go_on_by_themselves() -> None:
    start = ChannelAnswer(BOTH, CALL.removesuffix("<|call|>").format("f", '{"a'), SCHEMAS, spelled=True)
    for end in ('": 1}<|call|>', " other", "<|end|><|start|>assistant" + FINAL.format("x")):
        alone = ChannelAnswer(BOTH, CALL.removesuffix("<|call|>").format("f", '{"a'), SCHEMAS, spelled=True)
        copy = start.copied()
        assert (copy.feed(end), copy.finish()) == (alone.feed(end), alone.finish())


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_marks_that_are_spelled_are_text_where_marks_are_tokens(kind: type) -> None:
    """As where a model explains its own format, also in the strings of a call."""
    backend = kind()
    spelled = "<|end|><|start|>assistant"
    arguments = json.dumps({"a": spelled})
    letters = [backend.encode(each, add_special_tokens=False).ids for each in (spelled, arguments)]
    backend.add_special_tokens([*MARKS])
    tokenizer = Tokenizer(backend, {})
    assert not are_spelled(tokenizer)

    def tokens(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    written = mark_tokens(tokenizer)
    detokenizer = make_detokenizer(tokenizer, [], shown=frozenset(written), written=written)
    answer = ChannelAnswer(BOTH, "", SCHEMAS)
    whole = [*tokens("<|channel|>final<|message|>"), *letters[0], *tokens("<|end|><|start|>assistant")]
    whole += [*tokens(CALL.removesuffix("{}<|call|>").format("f")), *letters[1]]
    parts = [answer.feed(detokenizer.feed_one(token)) for token in [*whole, *tokens("<|call|>")]]
    assert "".join(part.content for part in parts).strip() == spelled
    calls = [call for part in parts for call in part.calls]
    assert [call.name for call in calls if call.name is not None] == ["f"]
    assert json.loads("".join(call.arguments for call in calls)) == {"a": spelled}


PIECES = [
    *MARKS,
    *("assistant", "user", "functions.f", " to=functions.f", "to=", "analysis", "commentary", "final", " json", "json"),
    *('{"a": 1}', "{", "}", '"', "\\", "text", " ", "\n", "<|", "<", "é", "日", "<|end", "\ufdd0", "\ud800"),
]


@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(texts=st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=14), seed=st.integers(0, 1 << 16))
def test_whatever_a_model_writes_is_the_same_however_it_is_cut(texts: list[str], seed: int) -> None:
    text = "".join(texts)
    expected = told([text])
    assert told(list(text)) == expected
    draw = random.Random(seed)
    at, pieces = 0, list[str]()
    while at < len(text):
        pieces.append(text[at : at + draw.randint(1, 9)])
        at += len(pieces[-1])
    assert told(pieces) == expected
    assert not set(ALL) & set(expected.content + expected.reasoning)


@pytest.mark.parametrize(
    "text", ["<|start|>" * 1000, "<|channel|>a" * 1000, "x" * 10_000, "<|" * 5000, "<|end|>a" * 1000]
)
def test_no_text_takes_long(text: str) -> None:
    begin = time.process_time()
    told([text])
    told(list(text))
    assert time.process_time() - begin < 2  # ten times of what is usual; minutes where it grows with the square


def test_a_message_is_shown_as_it_comes() -> None:
    answer = ChannelAnswer(BOTH, "", SCHEMAS)
    assert answer.feed(as_marks("<|channel|>analysis<|message|>")) == NOTHING
    assert answer.feed("We ").reasoning == "We "
    more = answer.more("think")
    assert more is not None
    assert more.reasoning == "think"
    assert answer.reasons
    assert answer.more(END) is None
    answer.feed(as_marks("<|end|><|start|>assistant<|channel|>final<|message|>"))
    assert answer.passes("Yes")
    assert not answer.passes(END)
    answer.feed(as_marks("<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>"))
    assert answer.feed('{"a').calls == (CallPart(0, "f", ""), CallPart(0, None, '{"a'))


TEMPLATE = "{{ tools }}<|start|>x<|channel|>y<|message|>z<|end|>"


def test_the_form_is_found_by_the_chat_template_or_named() -> None:
    assert find_forms(None, TEMPLATE).channels == Channels()
    assert find_forms(None, TEMPLATE.replace("tools", "x")).channels == Channels(calls=False)
    assert find_forms(None, TEMPLATE, NONE).channels == Channels(calls=False)
    assert find_forms(None, TEMPLATE, HARMONY, NONE).channels == Channels(reasoning=False)
    assert find_forms(None, "{{ tools }}", HARMONY).channels == Channels()
    assert find_forms(None, TEMPLATE, "hermes").channels is None
    spec = {"start_anchor": "A:", "fields": {"content": {}}}
    assert find_forms(spec, TEMPLATE).channels is None
    assert find_forms(spec, TEMPLATE, HARMONY).channels == Channels()
    forms = find_forms(None, TEMPLATE)
    assert (forms.calls, forms.reasons, forms.inserted) == (True, True, False)
