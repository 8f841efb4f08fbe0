"""Answers in channels, told apart while they come: the format `harmony` of gpt-oss.

An answer is a sequence of messages (https://github.com/openai/harmony/blob/main/docs/format.md):

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>
    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends after the first `<|start|>assistant`. Analysis is reasoning, a message to a function is a call, and
every other message of the assistant is content. What a model writes in another form is read as far as it goes: a header
that is none is text.
"""

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum, auto
from typing import Self

import regex

from services.gateway.text.model_output.channel_marks import (
    ALL,
    CALL,
    CHANNEL,
    CONSTRAIN,
    MESSAGE,
    START,
    SpelledMarks,
    as_marks,
)
from services.gateway.text.model_output.json_calls import CallPart, JsonCalls, JsonLayout
from services.gateway.text.model_output.template import Part
from services.gateway.text.model_output.told import NOTHING, Schemas, Told, both

_BEGIN = "<|start|>assistant"  # what a prompt ends with
_BETWEEN = "\n\n"  # texts of two messages that are one part of the answer
_FUNCTIONS = "functions."
_ARGUMENTS = JsonLayout(name=(), arguments=())  # all of a call's message

_SPLIT = re.compile(f"([{ALL}])")
_MARK = re.compile(f"[{ALL}]")

# What may stand before `<|message|>`: a role, a recipient, then a channel with more words. The role is any word after
# `<|start|>` alone.
_WORDS = rf"(?:\s*to=[^\s{ALL}]{{0,256}})?\s*(?:[{CHANNEL}{CONSTRAIN}][^\n{ALL}]{{0,128}}){{0,8}}"
_HEADER = regex.compile(rf"\s*(?:assistant)?{_WORDS}")
_STARTED_HEADER = regex.compile(rf"\s*[\w.:\-]{{0,128}}{_WORDS}")
_ROLE = re.compile(r"\s*(?:(?:user|system|developer|tool)\b|functions\.)")  # of messages that are not the assistant's
_RECIPIENT = re.compile(rf"to=([^\s{ALL}]+)|\b({_FUNCTIONS}[^\s{ALL}]+)")
_CHANNELS = re.compile(r"analysis|commentary|final")
# The part of a header before what is text, where `<|message|>` does not come.
_BEFORE_TEXT = re.compile(
    rf"\s*(?:assistant|user|system|developer|tool|functions[\w.\-]*)?(?:\s*to=[^\s{ALL}]*)?\s*(?:{CHANNEL}\s*\w*)?"
    rf"(?:\s*to=[^\s{ALL}]*)?\s*(?:{CONSTRAIN}?\s*json\b)?\s*"
)


@dataclass(frozen=True, slots=True)
class Channels:
    """The channels that are told apart from the content. calls: messages to functions. reasoning: analysis."""

    calls: bool = True
    reasoning: bool = True


class Place(Enum):
    """The place of an answer's next text."""

    HEADER = auto()
    MESSAGE = auto()
    BETWEEN = auto()  # after a message


def begun_message(prompt: str) -> str:
    """Returns what a prompt already has of the assistant's message."""
    return prompt.rpartition(_BEGIN)[2] if _BEGIN in prompt else ""


class ChannelAnswer:
    """See Answer. Marks are characters of `channel_marks`."""

    def __init__(
        self, channels: Channels, prompt: str = "", schemas: Schemas | None = None, *, spelled: bool = False
    ) -> None:
        """prompt: what the prompt already has of the message. spelled: marks may come in letters."""
        self._channels = channels
        self._known = frozenset(schemas or {})
        self._spelled = SpelledMarks() if spelled else None
        self.place = Place.HEADER
        self._header = ""
        self._started = False  # the header began with a mark
        self._part: Part | None = None  # of the message; None: it is none of the assistant's
        self._shown: frozenset[Part] = frozenset()  # parts that have text
        self._apart = False  # the message's first text comes after another one's
        self._calls: JsonCalls | None = None
        self._name = ""  # of the function that the message is for
        self._blank = True  # the call's message has no text yet
        self.num_calls = 0
        self.reasoned = False
        if prompt:
            self._take(as_marks(prompt))

    @property
    def reasons(self) -> bool:
        """See Answer."""
        return self.place is Place.MESSAGE and self._part is Part.REASONING

    @property
    def shows(self) -> bool:
        """True while the text is content."""
        return self.place is Place.MESSAGE and self._part is Part.CONTENT

    @property
    def in_header(self) -> bool:
        """True when a part of a header is there."""
        return self.place is Place.HEADER and bool(self._header.strip())

    def copied(self) -> Self:
        """See Answer."""
        other = copy(self)
        other._calls = None if self._calls is None else self._calls.copied()
        other._spelled = copy(self._spelled)
        return other

    def feed(self, text: str) -> Told:
        """See Answer."""
        return self._take(text if self._spelled is None else self._spelled.feed(text))

    def passes(self, text: str) -> bool:
        """See Answer."""
        if not text or not self.shows or self._apart or not self._is_plain(text):
            return False
        self._message(text)
        return True

    def more(self, text: str) -> Told | None:
        """See Answer."""
        return self._message(text) if self.place is Place.MESSAGE and self._is_plain(text) else None

    def finish(self, *, cut: bool = False) -> Told:
        """See Answer."""
        told = NOTHING if self._spelled is None else self._take(self._spelled.flush())
        if self.place is Place.HEADER:
            return both(told, self._end_header(cut=cut))
        return both(told, self._close(cut=cut))

    def _is_plain(self, text: str) -> bool:
        """True when a text has no marks."""
        return _MARK.search(text) is None and (self._spelled is None or self._spelled.passes(text))

    def _take(self, text: str) -> Told:
        told = NOTHING
        for piece in _SPLIT.split(text):
            if piece and piece in ALL:
                told = both(told, self._take_mark(piece))
            elif piece:
                told = both(told, self._take_text(piece))
        return told

    def _take_text(self, text: str) -> Told:
        if self.place is Place.HEADER:
            self._header += text
            return self._header_so_far()
        if self.place is Place.BETWEEN:
            text = text.lstrip()
            if not text:
                return NOTHING
            self._open("")
        return self._message(text)

    def _take_mark(self, mark: str) -> Told:
        if self.place is Place.HEADER:
            return self._mark_in_header(mark)
        if self.place is Place.MESSAGE and mark in (MESSAGE, CONSTRAIN):
            return NOTHING
        told = self._close()
        if mark == MESSAGE:
            self._open("")
        elif mark in (START, CHANNEL, CONSTRAIN):
            self._begin_header("" if mark == START else mark, started=mark == START)
        return told

    def _mark_in_header(self, mark: str) -> Told:
        if mark == MESSAGE:
            self._open(self._header)
            return NOTHING
        if mark in (CHANNEL, CONSTRAIN):
            self._header += mark
            return self._header_so_far()
        told = self._end_header(called=mark == CALL)
        if mark == START:
            self._begin_header("", started=True)
        return told

    def _begin_header(self, header: str, *, started: bool) -> None:
        self.place, self._header, self._started = Place.HEADER, header, started

    def _header_so_far(self) -> Told:
        """Reads the header as text where it can be none."""
        form = _STARTED_HEADER if self._started else _HEADER
        return NOTHING if form.fullmatch(self._header, partial=True) else self._header_as_text()

    def _end_header(self, *, cut: bool = False, called: bool = True) -> Told:
        """Ends a header without a message: a call without arguments, or text."""
        header = self._header
        if called and not cut and self._called(header) is not None:
            self._open(header)
            return self._close()
        told = self._header_as_text()
        return both(told, self._close(cut=cut))

    def _header_as_text(self) -> Told:
        """Shows what a header has beside its marks, in its channel."""
        header, end = self._header, 0
        if (self._started or CHANNEL in header) and (found := _BEFORE_TEXT.match(header)):
            end = found.end()
        self._open(header[:end], as_call=False)
        return self._message(_MARK.sub("", header[end:]))

    def _open(self, header: str, *, as_call: bool = True) -> None:
        """Begins a message."""
        started, self._started, self._header = self._started, False, ""
        self.place = Place.MESSAGE
        named = _CHANNELS.findall(header)
        name = self._called(header) if as_call else None
        if started and _ROLE.match(header):
            self._part = None
        elif name is not None:
            self._part, self._name, self._blank = Part.CALLS, name, True
            self._calls = JsonCalls(_ARGUMENTS, self.num_calls, name, None)
        elif named and named[-1] == "analysis" and self._channels.reasoning:
            self._part, self.reasoned = Part.REASONING, True
        else:
            self._part = Part.CONTENT
        self._apart = self._part in self._shown

    def _called(self, header: str) -> str | None:
        """Returns the name of the function that a header calls; None: it calls none."""
        found = _RECIPIENT.search(header)
        if found is None or not self._channels.calls:
            return None
        recipient = found[1] or found[2]
        name = recipient.removeprefix(_FUNCTIONS)
        return name if name in self._known or (name and name != recipient) else None

    def _message(self, text: str) -> Told:
        """Takes a text of the message."""
        if not text or self._part is None:
            return NOTHING
        if self._part is Part.CALLS:
            assert self._calls is not None
            self._blank = self._blank and text.isspace()
            return self._told(self._calls, self._calls.feed(text))
        if self._apart:
            text, self._apart = _BETWEEN + text, False
        self._shown |= {self._part}
        return Told(text) if self._part is Part.CONTENT else Told("", text)

    def _told(self, calls: JsonCalls, parts: Sequence[CallPart | str]) -> Told:
        """Returns the parts of a call, and text where the message is no call: all of it is content then."""
        self.num_calls = calls.call
        told = Told("", "", tuple(part for part in parts if isinstance(part, CallPart)))
        if not calls.rejected:
            return told
        self._part, self._apart, self._calls = Part.CONTENT, Part.CONTENT in self._shown, None
        return both(told, self._message("".join(part for part in parts if isinstance(part, str))))

    def _close(self, *, cut: bool = False) -> Told:
        """Ends the message, if there is one."""
        calls, self._calls, self.place = self._calls, None, Place.BETWEEN
        if calls is None or (self._blank and cut):
            return NOTHING
        if self._blank:
            self.num_calls += 1
            return Told("", "", (CallPart(calls.call, self._name, ""), CallPart(calls.call, None, "{}")))
        return self._told(calls, calls.close(cut=cut))
