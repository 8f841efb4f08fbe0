"""Bounds of the alternatives that a request asks for: those of each token, where -1 stands for the whole vocabulary,
and those of an answer whose tokens have many.
"""

from collections.abc import Sequence

from services.gateway.api.errors import invalid
from services.gateway.api.requests.schema import CommonRequest, Request
from services.protocol.capsule import Capsule
from services.protocol.sampling import FEW_ALTERNATIVES, MAX_ALTERNATIVES

_ALL = -1


def asks_for_many(request: CommonRequest) -> str | None:
    """Returns the first field that asks for more than FEW_ALTERNATIVES of each token; None: no field does."""
    asked = {name: getattr(request, name) or 0 for name in request.top_params}
    return next((name for name, top in asked.items() if top == _ALL or top > FEW_ALTERNATIVES), None)


def check_logprobs(request: CommonRequest, most: int, vocab_size: int) -> None:
    """Raises ApiError where a request asks for more than `most` alternatives of each token."""
    for name in request.top_params:
        asked = getattr(request, name) or 0
        number = vocab_size if asked == _ALL else asked
        if number > most:
            what = f"-1 stands for all {number} tokens" if asked == _ALL else f"not {number}"
            words = f"Invalid '{name}': at most {most} are allowed by this server (--max-logprobs), and {what}."
            raise invalid(words, name, "integer_above_max_value")


def with_whole_vocabulary(request: Request, vocab_size: int) -> Request:
    """Returns the request with the vocabulary's size in the place of each -1 that asks for all of it."""
    all_of = {name: vocab_size for name in request.top_params if getattr(request, name) == _ALL}
    return request.model_copy(update=all_of) if all_of else request


def check_alternatives(request: CommonRequest, capsules: Sequence[Capsule]) -> None:
    """Raises ApiError where tokens of the answer may have many alternatives, and all of these are too many.

    capsules: of all choices. Each choice has the logprobs of its prompt.
    """
    number = sum(capsule.many_alternatives for capsule in capsules)
    if number > MAX_ALTERNATIVES:
        param, count = asks_for_many(request), request.count_param
        words = f"With this '{param}', the answer may have {number} logprobs of alternatives. Where tokens have more"
        limit = f"than {FEW_ALTERNATIVES} each, it has at most {MAX_ALTERNATIVES} of them"
        remedy = f"ask for fewer, or lower '{count}', 'n' or the length of the prompt."
        raise invalid(f"{words} {limit}: {remedy}", param, "integer_above_max_value")
