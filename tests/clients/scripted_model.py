"""A model that follows a plan: what it answers depends on its prompt alone, so that a client's rounds never differ.

A user's turn names the plan, as `plan:NAME`. A plan has an answer for each round, and the round is the number of tools'
results that the prompt has after that turn. Tools are called only where the prompt offers them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llguidance

from services.gateway.api.generation import GenerationRequest
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.outcomes import FinishReason
from tests.clients.families import NO_THOUGHT, Calls, Family
from tests.gateway.scripted_generator import Script, delta_per_token

UNPLANNED = "Nothing was planned."  # the answer to what clients ask of their own accord, as for a title
EOS = "<|eos|>"
_PLAN = re.compile(r"\bplan:([\w-]+)")


@dataclass(frozen=True, slots=True)
class Round:
    """What the model answers in one round: a text, or calls after it."""

    text: str = ""
    calls: Calls = ()


def says(text: str) -> Round:
    """A round that ends the plan."""
    return Round(text)


def calls(name: str, /, **arguments: Any) -> Round:
    """A round with one call."""
    return Round("", ((name, arguments),))


class ScriptedModel:
    """Answers the requests of a gateway. prompts: all that it was given. excluded: answers that a grammar excludes."""

    def __init__(self, family: Family, tokenizer: Tokenizer) -> None:
        self.family = family
        self.plans: Mapping[str, Sequence[Round]] = {}
        self.prompts: list[str] = []
        self.excluded: list[str] = []
        self._tokenizer = tokenizer
        self._for_grammars = llguidance.LLTokenizer(tokenizer.backend.to_str())

    def forget(self) -> None:
        """Forgets plans, prompts and answers."""
        self.plans, self.prompts, self.excluded = {}, [], []

    def answer(self, request: GenerationRequest) -> Script:
        """Returns the tokens of the answer, as many as the request takes."""
        (capsule,) = request.capsules
        prompt = self._tokenizer.backend.decode(capsule.token_ids.tolist(), skip_special_tokens=False)
        self.prompts.append(prompt)
        text = self._written(self._round(prompt), prompt)
        tokens = self._tokenizer.backend.encode(text, add_special_tokens=False).ids
        if capsule.sampling.grammar:
            self._check(capsule.sampling.grammar, tokens, text)
        tokens += self._tokenizer.backend.encode(EOS, add_special_tokens=False).ids
        taken = tokens[: capsule.sampling.max_tokens]
        return Script(delta_per_token(taken, FinishReason.STOP if taken == tokens else FinishReason.LENGTH))

    def _round(self, prompt: str) -> Round:
        for end, turn in reversed(list(self._user_turns(prompt))):
            if named := _PLAN.findall(turn):
                plan, num_results = self.plans[named[-1]], prompt.count(self.family.result, end)
                return _reached(plan, num_results)
        return says(UNPLANNED)

    def _user_turns(self, prompt: str) -> Iterator[tuple[int, str]]:
        """Yields each turn with where it ends."""
        for found in re.finditer(re.escape(self.family.user), prompt):
            turn = prompt[found.end() :].partition(self.family.end)[0]
            yield found.end() + len(turn), turn

    def _written(self, planned: Round, prompt: str) -> str:
        offers_all = all(self.family.tool.format(name=name) in prompt for name, _ in planned.calls)
        text = planned.text if offers_all else UNPLANNED
        return self.family.write(text, planned.calls if offers_all else (), thinks=not prompt.endswith(NO_THOUGHT))

    def _check(self, grammar: str, tokens: Sequence[int], text: str) -> None:
        """Notes an answer that no worker would generate."""
        matcher = llguidance.LLMatcher(self._for_grammars, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        if not (matcher.consume_tokens(list(tokens)) and matcher.is_accepting()):
            self.excluded.append(text)


def _reached(plan: Sequence[Round], num_results: int) -> Round:
    """Returns the round of a plan that comes after so many results of tools."""
    for planned in plan:
        if num_results < len(planned.calls) or not planned.calls:
            return planned
        num_results -= len(planned.calls)
    raise AssertionError("a plan ends with a text")
