"""The work of jobs. It runs in a process of its own, and may take all the time and memory that there is."""

from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import llguidance
import orjson

from services.gateway.side.frames import JobKind
from services.gateway.text.chat_template import ChatTemplate, TemplateError

_TOO_DEEP = "it is nested too deeply."
_SMALL_JOB = orjson.dumps({"kind": JobKind.GRAMMAR, "grammar": 'start: "{" /[a-z]+/ "}"'})


class Jobs:
    """Does jobs. What all of them need is loaded once, in the forker."""

    def __init__(self, setup: bytes) -> None:
        """setup: JSON with the model's tokenizer.json as text, `tokenizer`."""
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._no_tokenizer = ""
        try:
            self._tokenizer = llguidance.LLTokenizer(orjson.loads(setup)["tokenizer"])
        except ValueError as error:
            self._no_tokenizer = f"no answer of this model can be made to have a form: {error}"
        self._work: Mapping[str, Callable[[dict[str, Any]], dict[str, str]]] = {
            JobKind.GRAMMAR: self._follow,
            JobKind.TEMPLATE: _render,
        }

    def warm_up(self) -> None:
        """Does a small job in a process that was just forked, so that the next one finds what it needs in memory."""
        self.do(_SMALL_JOB)

    def do(self, value: bytes) -> bytes:
        """Returns the answer to a job's value, both JSON."""
        job = orjson.loads(value)
        return orjson.dumps(self._work[job.pop("kind")](job))

    def _follow(self, job: dict[str, Any]) -> dict[str, str]:
        """Follows a grammar for one token. `error`: why that cannot be done; empty: it can.

        A grammar of large counts, as `(a{1000}){1000}`, shows what it costs with its second mask.
        """
        if self._tokenizer is None:
            return {"error": self._no_tokenizer}
        limits = llguidance.LLParserLimits(verbose_errors=False)  # the others are for the parser's inside
        matcher = llguidance.LLMatcher(self._tokenizer, job["grammar"], log_level=0, limits=limits)
        if not matcher.is_error():
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            first = (allowed & -allowed).bit_length() - 1
            if allowed and matcher.consume_tokens([first]) and not matcher.is_stopped():
                matcher.compute_bitmask()
        return {"error": matcher.get_error()}


def _render(job: dict[str, Any]) -> dict[str, str]:
    """Renders a template. `text`, or `error` and whose it is: `template` or `messages`."""
    try:
        template = ChatTemplate(job["source"], job["special_tokens"])
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"it has a syntax error in line {error.lineno}: {error.message}", "in": "template"}
    except RecursionError:
        return {"error": _TOO_DEEP, "in": "template"}
    except (SyntaxError, ValueError) as error:  # of Python, which the template was made to
        deep = isinstance(error, SyntaxError) and error.msg.startswith("too many")  # blocks, or levels of indentation
        return {"error": _TOO_DEEP if deep else "it is no valid template.", "in": "template"}
    try:
        return {"text": template.render(job["messages"], **job["options"])}
    except TemplateError as error:
        return {"error": str(error), "in": "messages"}
