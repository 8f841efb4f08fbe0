"""Conversations that are too long for the model, whose earliest turns are dropped: `truncation: "auto"`.

Dropped as a whole are a message of the user, and a step of the assistant: what it wrote and called, with the outputs.
The instructions stay, and so do the last message of the user and all that follows the last step's beginning.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.gateway.api.caller import Caller
from services.gateway.api.errors import TOO_LONG, ApiError
from services.gateway.api.records.request_record import RequestRecord
from services.gateway.api.request_runner import RequestRunner
from services.gateway.api.requests.chat import ChatRequest
from services.gateway.api.side_thread import SideThread
from services.gateway.openai.responses.items import (
    AnswerItem,
    CallItem,
    CallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ToolsItem,
    num_parts,
)
from services.gateway.openai.responses.kept import FEW_PARTS
from services.gateway.openai.responses.translation import ResponseChat

_MOST_FOR_ANSWER = 4  # a quarter of the context, at most, is left for the answer that is asked for
_LEFT_WHEN_CUT = 8  # an eighth, at least, where turns are dropped: else each further turn would drop some again

MakeChat = Callable[[Sequence[Item]], ResponseChat]


@dataclass(frozen=True, slots=True)
class _Turn:
    """Items that stay together. stays: they are never dropped."""

    items: Sequence[Item]
    stays: bool


class Fitting:
    """Drops turns until the rest fits the context."""

    def __init__(self, runner: RequestRunner[ChatRequest], side: SideThread) -> None:
        self._runner = runner
        self._side = side

    async def fitted(
        self, conversation: Sequence[Item], chat: ResponseChat, make: MakeChat, record: RequestRecord, caller: Caller
    ) -> ResponseChat:
        """Returns the chat, which `make` made of the conversation, or one of its later turns. Raises ApiError."""
        await caller.check(record)
        context = await self._runner.max_model_len()
        asked = min(chat.asked_tokens or 1, context // _MOST_FOR_ANSWER)
        if await self._num_tokens(chat, context, caller) + asked <= context:
            return chat
        most = context - max(asked, context // _LEFT_WHEN_CUT)
        turns = _turns(conversation)
        too_few, enough = 0, sum(not turn.stays for turn in turns)
        if not enough:
            return chat
        cut = await self._cut(turns, enough, make)
        while too_few + 1 < enough:
            middle = (too_few + enough) // 2
            shorter = await self._cut(turns, middle, make)
            if await self._num_tokens(shorter, context, caller) <= most:
                enough, cut = middle, shorter
            else:
                too_few = middle
        return cut

    async def _cut(self, turns: Sequence[_Turn], num_dropped: int, make: MakeChat) -> ResponseChat:
        items = [*_without_first(turns, num_dropped)]
        return await self._side.run_if(num_parts(items) > FEW_PARTS, make, items)

    async def _num_tokens(self, chat: ResponseChat, context: int, caller: Caller) -> int:
        """Returns the number of tokens of the prompt; some number above the context where there are more."""
        try:
            (prompt,) = await self._runner.dialect.prompts(chat, context, caller.tenant)
        except ApiError as error:
            if error.code == TOO_LONG:
                return context + 1
            raise
        return len(prompt.token_ids)


def _turns(items: Sequence[Item]) -> list[_Turn]:
    bounds = [*_begins(items), len(items)]
    turns = [items[begin:end] for begin, end in pairwise(bounds)]
    last_asked = max((number for number, turn in enumerate(turns) if any(map(_asks, turn))), default=-1)
    stays = {last_asked, len(turns) - 1}
    return [_Turn(turn, number in stays or _instructs(turn[0])) for number, turn in enumerate(turns)]


def _begins(items: Sequence[Item]) -> Iterator[int]:
    """Yields the places where turns begin. No call is in another turn than its output."""
    last_output = {item.call_id: number for number, item in enumerate(items) if isinstance(item, CallOutputItem)}
    bound = -1  # no turn begins up to there
    for number, item in enumerate(items):
        goes_on = isinstance(item, CallOutputItem) or (
            _is_answer(item) and number > 0 and _is_answer(items[number - 1])
        )
        if number == 0 or (number > bound and not goes_on):
            yield number
        if isinstance(item, CallItem):
            bound = max(bound, last_output.get(item.call_id, -1))


def _is_answer(item: Item) -> bool:
    return isinstance(item, AnswerItem | CallItem | ReasoningItem)


def _asks(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"


def _instructs(item: Item) -> bool:
    return isinstance(item, ToolsItem) or (isinstance(item, MessageItem) and item.role in ("system", "developer"))


def _without_first(turns: Sequence[_Turn], num_dropped: int) -> Iterator[Item]:
    """Yields the items that are left when the first so many turns that may be dropped are."""
    for turn in turns:
        if not turn.stays and num_dropped:
            num_dropped -= 1
            yield from filter(_instructs, turn.items)
        else:
            yield from turn.items
