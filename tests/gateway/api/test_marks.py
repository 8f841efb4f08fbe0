"""Any text up to a mark, and then a form, with tokenizers that have a token for the mark and those that have none."""

import llguidance
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer as Backend

from services.gateway.api.grammars.marks import after
from services.gateway.text.tokenizer import Tokenizer
from services.launcher import demo_model, random_model
from services.protocol.model_files.open import open_model
from tests.gateway.tokenizer_files import byte_level, sentencepiece

NUMBER = LLMatcher.grammar_from_regex("[0-9]{2}")
OBJECT = LLMatcher.grammar_from_json_schema('{"type": "object", "required": ["a"]}')


def demo() -> Backend:
    """The trained model's, or the random one's where that is not installed."""
    found = demo_model.find()
    path = random_model.made() if found.is_random else found.path
    return Backend.from_buffer(open_model(path).tokenizer())


KINDS = {"byte_level": byte_level, "sentencepiece": sentencepiece, "demo": demo}


class Model:
    """A tokenizer, and what the grammar engine reads in its tokens."""

    def __init__(self, backend: Backend) -> None:
        self.tokenizer = Tokenizer(backend, {})
        self.compiled = llguidance.LLTokenizer(backend.to_str())

    def accepts(self, grammar: str, answer: str) -> bool:
        matcher = LLMatcher(self.compiled, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = self.tokenizer.encode(answer, add_special_tokens=False).tolist()
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(KINDS[request.param]())


def test_marks_are_the_tokens_that_the_engine_keeps_apart_from_text(model: Model) -> None:
    added = model.tokenizer.backend.get_added_tokens_decoder()
    apart = {token.content for token_id, token in added.items() if model.compiled.is_special_token(token_id)}
    assert set(model.tokenizer.marks) == apart


@pytest.mark.few(15)
@pytest.mark.parametrize("mark", ["</think>", "</t>", "\n</think>\n", "so: ", "<|im_end|>"])
@pytest.mark.parametrize("grammar", [NUMBER, OBJECT, 'start: "x" y\ny: /[0-9]/'])
def test_a_form_begins_after_its_mark(model: Model, mark: str, grammar: str) -> None:
    right, wrong = {NUMBER: ("12", "1x"), OBJECT: ('{"a":1}', "{}")}.get(grammar, ("x1", "x"))
    whole = after(mark, grammar, model.tokenizer.marks)
    for text in ("", "let me see", "the\n\nnumber 77 is < that\n"):
        assert model.accepts(whole, text + mark + right)
        assert not model.accepts(whole, text + mark + wrong)
        assert not model.accepts(whole, text + mark + "and " + mark + right)
        assert not model.accepts(whole, text + right)


def test_several_marks_follow_one_another(model: Model) -> None:
    whole = after("</think>", after("Answer: ", NUMBER, model.tokenizer.marks), model.tokenizer.marks)
    assert model.accepts(whole, "hm Answer: </think>so, Answer: 42")
    assert not model.accepts(whole, "hm Answer: 42")
