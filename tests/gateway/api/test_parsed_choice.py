"""A choice with reasoning and calls: single tokens become the same updates in the short form and by way of deltas."""

import pytest

from services.gateway.api.answers.choice import Ending, Update
from services.gateway.api.answers.parsed_choice import ParsedChoice
from services.gateway.api.answers.reading import Reading
from services.gateway.api.generation import Delta
from services.gateway.text.detokenizer import make_detokenizer
from services.gateway.text.model_output.answer import AnswerText
from services.gateway.text.model_output.formats import REASONING_FORMS, START_ANCHORS, TOOL_FORMS
from services.gateway.text.model_output.parser import ParserTables
from services.gateway.text.model_output.template import load_template
from services.gateway.text.sequence_text import SequenceText
from services.gateway.text.tokenizer import Tokenizer, load_tokenizer
from services.launcher import random_model
from services.protocol.model_files.open import open_model
from services.protocol.outcomes import FinishReason

ANSWER = (
    "<think>\nLet me think about größe, 日本 and 🙂 .\n</think>\n\nHere it is: <tool_call>\n"
    '{"name": "f", "arguments": {"a": [1, {"b": "x } y"}], "c": "a longer text"}}\n</tool_call>\n and the end'
)
FIELDS = {"reasoning_content": REASONING_FORMS["think"].field, "tool_calls": TOOL_FORMS["hermes"].field}
TABLES = ParserTables(load_template({"start_anchor": START_ANCHORS, "fields": {"content": {}, **FIELDS}}))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_model(random_model.made()))


def choice(tokenizer: Tokenizer, *, single_call: bool = False) -> ParsedChoice:
    text = SequenceText(make_detokenizer(tokenizer, []), (), 0)
    start = AnswerText(TABLES, "", {"f": {}})
    reading = Reading(start=start, marks=frozenset(), reasons=True, single_call=single_call)
    return ParsedChoice(0, text, None, Ending(), reading)


def seen(update: Update) -> tuple[object, ...]:
    """What a client sees of an update, without the random id of a call."""
    calls = [(part.call, part.name, part.arguments) for part in update.tool_calls]
    return update.text, update.reasoning, calls, update.finish_reason


def test_the_short_form_says_the_same_as_deltas(tokenizer: Tokenizer):
    by_deltas, in_short = choice(tokenizer), choice(tokenizer)
    extend, extend_part = in_short.extend, in_short.extend_part
    assert extend is not None
    assert extend_part is not None
    num_parts = 0
    for token in tokenizer.backend.encode(ANSWER, add_special_tokens=False).ids:
        delta = Delta([token], None, FinishReason.NONE, 0, 0)
        expected = seen(by_deltas.take(delta))
        if (text := extend(token)) is not None:
            assert (text, "", [], None) == expected
        elif (part := extend_part(token)) is not None:
            num_parts += 1
            assert seen(part) == expected
        else:
            assert seen(in_short.take(delta)) == expected
        assert in_short.num_reasoning == by_deltas.num_reasoning
    assert num_parts > 20
    assert by_deltas.num_reasoning


def test_a_call_that_may_end_the_answer_has_no_short_form(tokenizer: Tokenizer):
    assert choice(tokenizer, single_call=True).extend_part is None
