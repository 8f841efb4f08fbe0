"""Clients of background responses: each begins one at a gateway, leaves, and asks for it at either gateway.

A response must come to its end, with the answer of a stack without faults; and whoever asks again, anywhere, is told
the same. Where its gateway was killed it may have failed, and is begun again; likewise where Redis, which keeps nothing
on a disk here, was killed or restarted after it had taken the answer.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson

from loadtest import http_stream
from loadtest.cannot_run import CannotRun
from loadtest.http_stream import Address, HttpError, NoConnection, StatusError
from loadtest.soak.cases import is_clear
from loadtest.soak.traffic import HANGS_S, NOBODY_S, Counts, Killed

_PATH = "/v1/responses"
_WORDS = ("north", "river", "seven", "letter", "green", "winter", "paper", "stone", "under", "early")
_LENGTHS, _ANSWER_LENGTHS = (4, 30, 120), (8, 64, 200)  # words of an input; tokens of an answer
_ANSWER_S, _ASK_S = 60.0, 15.0
_LOOK_S = (0.05, 0.5)  # between two looks at a response
_UNKNOWN = "404"
_FINAL = ("completed", "incomplete", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Known:
    """A request, and the text of the answer of a stack without faults."""

    input: str
    num_tokens: int
    text: str = ""

    def body(self, model: str, **fields: object) -> bytes:
        """Builds a greedy request."""
        wanted = {"model": model, "input": self.input, "max_output_tokens": self.num_tokens}
        return orjson.dumps({**wanted, "temperature": 0, "ignore_eos": True, **fields})


async def known_answers(address: Address, model: str, seed: int, number: int) -> list[Known]:
    """Asks a stack without faults for so many answers without near ties. Raises HttpError, CannotRun."""
    chance, found = random.Random(f"background {seed}"), list[Known]()
    for _ in range(20 * number):
        words = " ".join(chance.choices(_WORDS, k=chance.choice(_LENGTHS)))
        asked = Known(words, chance.choice(_ANSWER_LENGTHS))
        body = asked.body(model, store=False, include=["message.output_text.logprobs"], top_logprobs=2)
        async with asyncio.timeout(_ANSWER_S):
            response = orjson.loads((await http_stream.ask(address, _PATH, body)).body())
        (part,) = (part for item in response["output"] for part in item["content"])
        tops = [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in part["logprobs"]]
        if all(map(is_clear, tops)):
            found.append(Known(asked.input, asked.num_tokens, part["text"]))
        if len(found) == number:
            return found
    raise CannotRun(f"{len(found)} of {number} background responses had answers without near ties")


class BackgroundTraffic:
    """Clients, each with one background response at a time. `counts` rise as responses end."""

    def __init__(
        self,
        gateways: Mapping[str, Address],
        model: str,
        known: Sequence[Known],
        seed: int,
        killed: Killed,
        counts: Counts,
    ) -> None:
        self.counts = counts
        self._gateways, self._model, self._known = gateways, model, known
        self._seed = seed
        self._killed = killed

    async def run(self, num_clients: int, seconds: float) -> None:
        """Begins responses for so long, and returns when all of them have ended."""
        until = time.perf_counter() + seconds
        async with asyncio.TaskGroup() as clients:
            for index in range(num_clients):
                clients.create_task(self._client(random.Random(f"background {self._seed} {index}"), until))

    async def _client(self, chance: random.Random, until: float) -> None:
        while time.perf_counter() < until:
            await asyncio.sleep(chance.uniform(*_LOOK_S))
            await self.ask(chance.choice(self._known), chance)

    async def ask(self, known: Known, chance: random.Random) -> None:
        """Begins a response until a gateway takes it, follows it to its end, and counts what came of it."""
        self.counts.background += 1
        while not await self._try(known, chance):
            await asyncio.sleep(NOBODY_S)

    async def _try(self, known: Known, chance: random.Random) -> bool:
        """True when the response is over; False when it is to be begun again."""
        gateway, began_s, counts = chance.choice(list(self._gateways)), time.perf_counter(), self.counts
        response: dict[str, Any] = {}
        try:
            async with asyncio.timeout(HANGS_S):
                response = await self._ask(gateway, _PATH, known.body(self._model, background=True))
                response = await self._final(response, chance)
                again = await self._final(response, chance)  # at any gateway
        except NoConnection:
            counts.sent_elsewhere += 1
            return False
        except StatusError as error:
            counts.failed[f"background: {error}"] += 1
            return True
        except (HttpError, TimeoutError) as error:
            if self._killed(gateway, began_s):
                counts.gateway_killed += 1
                return False
            told = await self._told(response["id"]) if response else {}
            if self._killed("redis", began_s) and set(told.values()) == {_UNKNOWN}:
                counts.forgotten += 1
                return False
            counts.lost[f"background: {error}" if str(error) else "background: it did not come in time"] += 1
            counts.lost_wishes.append(f"background, begun at {gateway}: {response.get('id', 'no id came')}, {told}")
            return True
        if response["status"] == "failed" and self._killed(gateway, began_s):
            counts.gateway_killed += 1
            return False
        self._count(known, response, again)
        return True

    async def _final(self, response: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
        """Asks for a response until its status is final. Those who cannot tell now are asked again."""
        while True:
            await asyncio.sleep(chance.uniform(*_LOOK_S))
            try:
                found = await self._ask(chance.choice(list(self._gateways)), f"{_PATH}/{response['id']}", None)
            except (HttpError, TimeoutError):  # also 404: Redis may have forgotten what its gateway still knows
                continue
            if found["status"] in _FINAL:
                return found

    async def _told(self, response_id: str) -> dict[str, str]:
        """Returns what each gateway says of a response that did not end. Those who cannot tell now are asked again."""
        told = dict.fromkeys(self._gateways, "nothing")
        until = time.perf_counter() + _ANSWER_S
        while "nothing" in told.values() and time.perf_counter() < until:
            for gateway in [gateway for gateway, answer in told.items() if answer == "nothing"]:
                try:
                    told[gateway] = (await self._ask(gateway, f"{_PATH}/{response_id}", None))["status"]
                except StatusError as error:
                    if error.status == HTTPStatus.NOT_FOUND:
                        told[gateway] = _UNKNOWN
                except (HttpError, TimeoutError):
                    continue
            await asyncio.sleep(NOBODY_S)
        return told

    async def _ask(self, gateway: str, path: str, body: bytes | None) -> dict[str, Any]:
        async with asyncio.timeout(_ASK_S):
            answer = await http_stream.ask(self._gateways[gateway], path, body)
        try:
            described: dict[str, Any] = orjson.loads(answer.body())
        except orjson.JSONDecodeError as error:
            raise HttpError(f"the answer broke off: {error}") from error
        return described

    def _count(self, known: Known, response: dict[str, Any], again: dict[str, Any]) -> None:
        counts, text = self.counts, _text(response)
        if response != again:
            counts.wrong += 1
            counts.wrong_wishes.append(f"background: {response!r}, and later {again!r}")
        elif response["status"] == "failed":
            counts.failed[f"background: {response['error']['message']}"] += 1
        elif text != known.text:
            counts.wrong += 1
            counts.wrong_wishes.append(f"background: {text!r} instead of {known.text!r}")
        else:
            counts.finished += 1


def _text(response: Mapping[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])
