"""Answers to many schemas through a whole stack: every one handed off, some of them while a decode worker is killed.

python -m tests.e2e.schema_answers --schemas 500 --kills 4
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai

from tests.e2e.conftest import prompt_of, write_model
from tests.e2e.schemas import Schema, draw
from tests.e2e.stack import Stack, running_stack
from tests.faults.case import busiest

_CLIENTS = 8
_MAX_TOKENS = 400


def _is_date(value: object) -> bool:
    """Reads a date of RFC 3339, which has the year 0. Python has not; it is a leap year."""
    return not isinstance(value, str) or bool(date.fromisoformat(re.sub("^0000", "2000", value)))


def _formats() -> jsonschema.FormatChecker:
    formats = jsonschema.FormatChecker([*jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers.keys() - {"date"}])
    formats.checks("date", raises=ValueError)(_is_date)
    return formats


@dataclass
class Outcome:
    """What became of the answers to a list of schemas, by their numbers there.

    continued: attempts beyond one for each request, which other workers continued.
    """

    stopped: list[int] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)  # finish reason `length`
    refused: dict[int, str] = field(default_factory=dict)
    invalid: dict[int, str] = field(default_factory=dict)
    kills: int = 0
    continued: int = 0
    handed_off: int = 0

    def __str__(self) -> str:
        ends = f"{len(self.stopped)} stop, {len(self.cut)} length, {len(self.refused)} refused"
        workers = f"{self.handed_off} handed off, {self.kills} workers killed, {self.continued} attempts continued"
        return f"{ends}; {len(self.invalid)} of those that stop are invalid; {workers}"


def ask_all(stack: Stack, schemas: list[Schema], num_kills: int) -> Outcome:
    """Asks for an answer to each schema, and kills as many decode workers meanwhile, evenly spread."""
    outcome = Outcome()
    attempts = stack.gateway.metric("baton_attempts_total")
    handoffs = stack.gateway.metric("baton_handoffs_total", outcome="completed")
    kill_after = [len(schemas) * (number + 1) // (num_kills + 1) for number in range(num_kills)]
    with ThreadPoolExecutor(_CLIENTS) as clients:
        asked = {clients.submit(_ask, stack, schema, number): number for number, schema in enumerate(schemas)}
        for num_done, done in enumerate(as_completed(asked)):
            _take(outcome, asked[done], done, schemas)
            if outcome.kills < num_kills and num_done >= kill_after[outcome.kills] and _kill_busiest(stack):
                outcome.kills += 1
    sent = len(schemas) - len(outcome.refused)
    outcome.continued = int(stack.gateway.metric("baton_attempts_total") - attempts) - sent
    outcome.handed_off = int(stack.gateway.metric("baton_handoffs_total", outcome="completed") - handoffs)
    return outcome


def _ask(stack: Stack, schema: Schema, number: int) -> Any:
    answer = stack.gateway.client.completions.create(
        model="tiny",
        prompt=prompt_of(900 + number % 100, 40),
        temperature=1.0,
        seed=number,
        max_tokens=_MAX_TOKENS,
        extra_body={"structured_outputs": {"json": schema}},
    )
    return answer.choices[0]


def _take(outcome: Outcome, number: int, done: "Future[Any]", schemas: list[Schema]) -> None:
    try:
        choice = done.result()
    except openai.BadRequestError as error:
        outcome.refused[number] = str(error)
        return
    if choice.finish_reason != "stop":
        outcome.cut.append(number)
        return
    outcome.stopped.append(number)
    try:
        jsonschema.Draft202012Validator(schemas[number], format_checker=_formats()).validate(json.loads(choice.text))
    except (ValueError, jsonschema.ValidationError) as error:
        outcome.invalid[number] = f"{choice.text!r}: {error}"


def _kill_busiest(stack: Stack) -> bool:
    """Kills the decode worker with most requests, and starts it again. False: none has any now."""
    try:
        name = busiest(stack, "decode")
    except AssertionError:
        return False
    stack.workers[name].kill()
    stack.heal()
    return True


def _named(title: str, found: Iterable[tuple[int, str]], schemas: list[Schema]) -> None:
    for number, words in found:
        print(f"{title} {number}: {json.dumps(schemas[number])}\n    {words}")


def main() -> int:
    """Asks for many answers, and prints what became of them."""
    parser = argparse.ArgumentParser(description="answers to many schemas, through handoffs and killed workers")
    parser.add_argument("--schemas", type=int, default=500, help="how many")
    parser.add_argument("--kills", type=int, default=4, help="decode workers to kill meanwhile")
    arguments = parser.parse_args()
    schemas = draw(arguments.schemas)
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "llama", "llama")
        with running_stack(model, decode=2, options=["--max-num-batched-tokens", "37"]) as stack:
            outcome = ask_all(stack, schemas, arguments.kills)
            stack.gateway.wait_for_baseline()
    _named("refused", outcome.refused.items(), schemas)
    _named("invalid", outcome.invalid.items(), schemas)
    print(outcome)
    return 0 if not outcome.invalid and len(outcome.stopped) >= 0.95 * len(schemas) else 1


if __name__ == "__main__":
    sys.exit(main())
