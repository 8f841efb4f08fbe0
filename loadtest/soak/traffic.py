"""Clients that ask for answers, read them in their ways, and count what came of each."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from loadtest import http_stream
from loadtest.http_stream import Address, Answer, HttpError, NoConnection
from loadtest.soak import grpc_stream
from loadtest.soak.answers import Reading, read
from loadtest.soak.cases import Case

# A request without an end by then is lost: gateways answer within 60 s, and slow readers take their time.
HANGS_S = 100.0
_NUM_CHOICES = (1, 1, 1, 2, 3, 4)
_ABORTED, _SLOW, _GRPC = 0.1, 0.08, 0.3  # shares of the requests
_ABORT_S, _REST_S = (0.0, 1.0), (0.01, 0.1)  # seconds: when a client leaves; a slow reader's pauses
_THINK_S = (0.0, 2.0)  # between two requests of a client
NOBODY_S = 0.5  # until the next try where no gateway takes the connection

Killed = Callable[[str, float], bool]  # true when a gateway was killed since a moment on perf_counter's clock


@dataclass(frozen=True, slots=True)
class Wish:
    """One request: what is asked, and how its answer is read. grpc: by the gRPC API, as a stream without logprobs."""

    case: Case
    gateway: str
    n: int
    stream: bool
    logprobs: bool
    grpc: bool = False
    abort_s: float | None = None
    rest_s: float = 0.0


@dataclass(slots=True)
class Counts:
    """Counts of all requests. Each is finished, aborted by its client, failed in words, or lost.

    requests: over HTTP and gRPC, grpc: those over gRPC alone, background: responses in the background.
    lost: it ended without a word, or not at all. wrong: any of them that had another text or token than expected.
    gateway_killed: tries that ended with their gateway, after which the client asked the other one.
    forgotten: background responses that were gone after Redis ended, which had taken them.
    sent_elsewhere: tries for which a gateway took no connection.
    longest_pause_s, longest_first_s: of streams that are not read slowly: between two chunks, and to the first one.
    """

    requests: int = 0
    grpc: int = 0
    background: int = 0
    finished: int = 0
    aborted: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    gateway_killed: int = 0
    forgotten: int = 0
    sent_elsewhere: int = 0
    longest_pause_s: float = 0.0
    longest_first_s: float = 0.0
    wrong_wishes: list[str] = field(default_factory=list)
    lost_wishes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Doors:
    """A gateway's ports."""

    http: Address
    grpc: Address


class Traffic:
    """Clients, each with one request at a time, over all gateways. `counts` rise as answers end."""

    def __init__(
        self, gateways: Mapping[str, Doors], model: str, cases: Sequence[Case], seed: int, killed: Killed
    ) -> None:
        self.counts = Counts()
        self._gateways, self._model, self._cases = gateways, model, cases
        self._seed = seed
        self._killed = killed

    async def run(self, num_clients: int, seconds: float) -> None:
        """Begins requests for so long, and returns when all of them have ended."""
        until = time.perf_counter() + seconds
        async with asyncio.TaskGroup() as clients:
            for index in range(num_clients):
                clients.create_task(self._client(random.Random(f"client {self._seed} {index}"), until))

    async def _client(self, chance: random.Random, until: float) -> None:
        await asyncio.sleep(chance.uniform(*_THINK_S))
        while time.perf_counter() < until:
            await self.ask(self._wish(chance))
            await asyncio.sleep(chance.uniform(*_THINK_S))

    def _wish(self, chance: random.Random) -> Wish:
        way, grpc = chance.random(), chance.random() < _GRPC
        return Wish(
            case=chance.choice(self._cases),
            gateway=chance.choice(list(self._gateways)),
            n=chance.choice(_NUM_CHOICES),
            stream=grpc or _ABORTED <= way < _ABORTED + _SLOW or chance.random() < 0.7,
            logprobs=chance.random() < 0.5 and not grpc,
            grpc=grpc,
            abort_s=chance.uniform(*_ABORT_S) if way < _ABORTED else None,
            rest_s=chance.uniform(*_REST_S) if _ABORTED <= way < _ABORTED + _SLOW else 0.0,
        )

    async def ask(self, wish: Wish) -> None:
        """Sends a request until a gateway answers it, and counts what came of it."""
        self.counts.requests += 1
        self.counts.grpc += wish.grpc
        until = time.perf_counter() + HANGS_S
        others = [name for name in self._gateways if name != wish.gateway] or [wish.gateway]
        gateway = wish.gateway
        while not await self._try(wish, gateway, until):
            gateway = others[0] if gateway == wish.gateway else wish.gateway

    async def _try(self, wish: Wish, gateway: str, until: float) -> bool:
        """True when the request is over; False when the other gateway is to be asked."""
        reading, began_s, counts = Reading(), time.perf_counter(), self.counts
        leaves_s = HANGS_S if wish.abort_s is None else wish.abort_s
        broke: str | None = None
        left = False
        try:
            async with asyncio.timeout(min(leaves_s, until - began_s)):
                await self._read(wish, self._gateways[gateway], reading)
        except TimeoutError:
            left = leaves_s < until - began_s  # of its own accord
            broke = f"no end within {HANGS_S:g} s"
        except NoConnection:
            counts.sent_elsewhere += 1
            await asyncio.sleep(NOBODY_S)
            if time.perf_counter() < until:
                return False
            broke = f"no gateway took it within {HANGS_S:g} s"
        except HttpError as error:
            broke = str(error)
        self._check(wish, reading)
        if not reading.whole:
            if left:
                counts.aborted += 1
                return True
            if self._killed(gateway, began_s):
                counts.gateway_killed += 1
                return False
        self._count(wish, gateway, reading, began_s, broke)
        return True

    async def _read(self, wish: Wish, doors: Doors, reading: Reading) -> None:
        """Asks, and reads what came of the answer, also where it broke off. Raises HttpError."""
        if wish.grpc:
            await grpc_stream.ask(doors.grpc, wish.case, wish.n, reading, wish.rest_s)
            return
        answer = Answer()
        body = wish.case.body(wish.n, wish.stream, wish.logprobs, self._model)
        try:
            await http_stream.ask(doors.http, "/v1/completions", body, answer, wish.rest_s)
        finally:
            read(answer, wish.stream, reading)

    def _check(self, wish: Wish, reading: Reading) -> None:
        if reading.is_wrong(wish.case, wish.n, wish.logprobs):
            self.counts.wrong += 1
            found = {index: choice.text for index, choice in sorted(reading.choices.items())}
            self.counts.wrong_wishes.append(
                f"n={wish.n} stream={wish.stream} grpc={wish.grpc} prompt of {len(wish.case.prompt)} tokens: {found!r} "
                f"instead of {wish.case.text!r}"
            )

    def _count(self, wish: Wish, gateway: str, reading: Reading, began_s: float, broke: str | None) -> None:
        counts = self.counts
        if reading.times_s and not wish.rest_s:
            counts.longest_pause_s = max(counts.longest_pause_s, reading.longest_pause_s)
            counts.longest_first_s = max(counts.longest_first_s, reading.times_s[0] - began_s)
        if reading.error is not None:
            counts.failed[reading.error] += 1
        elif reading.whole:
            counts.finished += 1
        else:
            counts.lost[broke or "the connection ended before the answer"] += 1
            ago_s = time.perf_counter() - began_s
            counts.lost_wishes.append(
                f"n={wish.n} stream={wish.stream} grpc={wish.grpc} logprobs={wish.logprobs} rest_s={wish.rest_s:.3f} "
                f"prompt of "
                f"{len(wish.case.prompt)} tokens, {len(wish.case.tokens)} to be generated, {len(reading.times_s)} "
                f"chunks came; at {gateway} for {ago_s:.1f} s, ended at {time.strftime('%H:%M:%S', time.gmtime())} UTC"
            )
