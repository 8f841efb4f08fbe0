"""A choice whose text is told apart: content, reasoning, and calls of tools."""

from collections.abc import Callable, Iterator, Sequence

from services.gateway.api.answers.choice import Choice, Ending, PromptShown, ToolCallPart, Update, joined
from services.gateway.api.answers.reading import Reading
from services.gateway.api.generation import Delta
from services.gateway.text.model_output.input_text import InputText
from services.gateway.text.model_output.json_calls import CallPart
from services.gateway.text.model_output.told import Told, both
from services.gateway.text.sequence_text import SequenceText
from services.protocol.outcomes import FinishReason


class ParsedChoice(Choice):
    """See Choice. An answer that ends by itself after a call has the finish reason `tool_calls`."""

    def __init__(
        self, index: int, text: SequenceText, prompt: PromptShown | None, ending: Ending, reading: Reading
    ) -> None:
        super().__init__(index, text, prompt, ending)
        self._reading = reading
        self._answer = reading.begin()
        self._called = False
        self._input: InputText | None = None  # of the last call, where that is one of a custom tool
        if reading.reasons:
            self.num_reasoning = 0

    @property
    def extend(self) -> Callable[[int], str | None] | None:
        """See Choice. Returns None for a token that is not content and nothing else."""
        peek, passes = self._text.peek, self._answer.passes
        if peek is None:
            return None

        def extend(token: int) -> str | None:
            text = peek(token)
            return text if text is not None and passes(text) else None

        return extend

    @property
    def extend_part(self) -> Callable[[int], Update | None] | None:
        """Turns tokens of reasoning, and of arguments of calls, into updates; None: no token, as Choice says."""
        peek, more = self._text.peek, self._answer.more
        if peek is None or self._reading.single_call:  # which may end the answer
            return None

        def extend(token: int) -> Update | None:
            text = peek(token)
            told = None if text is None else more(text)
            if told is None:
                return None
            if self.num_reasoning is not None and self._answer.reasons:
                self.num_reasoning += 1
            return self._update(Update(self._index, "", [token], None, None), told)

        return extend

    def _generated(self, delta: Delta) -> Update:
        """See Choice. Tokens are taken one by one where their number in a part of the answer matters."""
        if len(delta.tokens) < 2 or (self.num_reasoning is None and not self._reading.single_call):
            return self._told(super()._generated(delta))
        updates = []
        for each in _one_by_one(delta):
            updates.append(self._told(super()._generated(each)))
            if updates[-1].finish_reason is not None:
                break
        calls = tuple(part for update in updates for part in update.tool_calls)
        return joined([update._replace(tool_calls=()) for update in updates])._replace(tool_calls=calls)

    def _told(self, update: Update) -> Update:
        told, finish = self._answer.feed(update.text), update.finish_reason
        if self.num_reasoning is not None and self._answer.reasons:
            self.num_reasoning += len(update.tokens)
        if finish is None and self._reading.single_call and self._answer.num_calls:
            finish = "stop"
        if finish is not None:
            told = both(told, self._answer.finish(cut=finish == "length"))
        update = self._update(update, told)
        if finish == "stop" and self._called:
            finish = "tool_calls"
        return update if finish == update.finish_reason else update._replace(finish_reason=finish)

    def _update(self, update: Update, told: Told) -> Update:
        """Puts the parts that a text was told apart into in the place of it."""
        calls = self._parts(told.calls) if told.calls else ()
        reasoning = told.reasoning if self._reading.shows_reasoning else ""
        return Update(
            update.choice,
            told.content,
            update.tokens,
            update.logprobs,
            update.finish_reason,
            update.prompt_logprobs,
            reasoning,
            calls,
            update.stop_reason,
            update.prompt_token_ids,
            update.echoed,
        )

    def _parts(self, calls: Sequence[CallPart]) -> tuple[ToolCallPart, ...]:
        parts = []
        for call, name, arguments in calls:
            if call and self._reading.single_call:
                continue
            self._called = True
            call_id = None if name is None else self._reading.new_call_id()
            if name is not None:
                self._input = InputText() if name in self._reading.custom else None
            if self._input is None:
                parts.append(ToolCallPart(call, call_id, name, arguments))
            elif (text := self._input.feed(arguments)) or name is not None:
                parts.append(ToolCallPart(call, call_id, name, text, custom=True))
        return tuple(parts)


def _one_by_one(delta: Delta) -> Iterator[Delta]:
    last = len(delta.tokens) - 1
    for index, token in enumerate(delta.tokens):
        yield Delta(
            [token],
            None if delta.logprobs is None else delta.logprobs[index : index + 1],
            delta.finish if index == last else FinishReason.NONE,
            delta.cached_tokens,
            delta.choice,
            None if index else delta.prompt_logprobs,
        )
