"""The limits of a prompt's text, and the errors for what is beyond them."""

from dataclasses import dataclass

from services.gateway.api.errors import TOO_LONG, ApiError, invalid
from services.gateway.text.cuts import MOST_UNCUT, NoCuts
from services.gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLimits:
    """The limits of one text.

    max_tokens: of the context. kept: the number of tokens that it is cut to; None: it is not cut. from_right: the first
    ones are kept, and not the last ones. param: the field that it comes from.
    """

    max_tokens: int
    kept: int | None
    from_right: bool
    param: str

    def part_of(self, tokenizer: Tokenizer, text: str) -> str:
        """Returns a part of the text that has all tokens that matter: there are no more than a few times as many.

        Raises ApiError for a text that has more than its context, and for one that has no such part.
        """
        fitting = self.max_tokens + 1
        wanted = fitting if self.kept is None else min(self.kept, fitting)
        try:
            part = tokenizer.cuts.part(text, wanted, from_left=self.kept is not None and not self.from_right)
        except NoCuts as error:
            words = f"it must have at most {MOST_UNCUT} characters, or words and sentences among them."
            raise invalid(f"Invalid '{self.param}': {words}", self.param, "string_above_max_length") from error
        if wanted == fitting and part is not text:
            raise far_too_long(self.max_tokens, self.param)
        return part


def too_long(max_tokens: int, found: str, param: str) -> ApiError:
    """The error for what does not fit the context. `found`: the client's own number."""
    message = f"This model's maximum context length is {max_tokens} tokens. However, {found}."
    return invalid(message, param, TOO_LONG)


def far_too_long(max_tokens: int, param: str) -> ApiError:
    return too_long(max_tokens, f"your {param} is far longer", param)
