"""Structural tags as grammars.

A tag becomes one grammar in Lark's notation; schemas, regular expressions and grammars in it are grammars of their own,
which it refers to by name. So their rules do not meet.
"""

from collections.abc import Iterable, Mapping
from enum import Enum, auto

import orjson

from services.gateway.api.grammars.forms import lark_string, of_grammar, of_regex, of_schema, too_large, wrong
from services.gateway.api.grammars.marks import ANY, Marks, grammars_of
from services.gateway.api.requests.form_texts import MAX_CHARS, JsonStyle
from services.gateway.api.requests.structural_tag import (
    MAX_PARTS,
    AnyText,
    ConstString,
    Either,
    Format,
    GrammarText,
    JsonSchema,
    Regex,
    Repeated,
    SeparatedTags,
    Sequence,
    Tag,
    TriggeredTags,
)

_MAX_DEPTH = 32


class _Open(Enum):
    """The part of a tag after a format that no mark ends."""

    ANSWER_ENDS = auto()
    FORMAT = auto()  # another one, or it is not known


_Ends = tuple[str, ...] | _Open  # marks, one of which ends a format

_TIMES = {"optional": "?", "star": "*", "plus": "+"}


def of_tag(root: Format, style: JsonStyle, tokens: Mapping[str, int], param: str) -> str:
    """Returns the grammar of a structural tag. Raises ApiError.

    style: of all JSON in it. tokens: see `Marks`. param: the field that the tag is in.
    """
    if len(root.model_dump_json(exclude_none=True)) > MAX_CHARS:
        raise too_large(param)
    return _TagGrammar(style, Marks(tokens), param).of(root)


class _TagGrammar:
    """One translation: the rules and the grammars that it has found necessary so far."""

    def __init__(self, style: JsonStyle, marks: Marks, param: str) -> None:
        self._style = style
        self._marks = marks
        self._param = param
        self._rules = [ANY]
        self._grammars: list[dict[str, object]] = []
        self._num_formats = 0

    def of(self, root: Format) -> str:
        start = self._content(root, _Open.ANSWER_ENDS, 0)
        main = {"lark_grammar": "\n".join([f"start: {start}", *self._rules])}
        return orjson.dumps({"grammars": [main, *self._grammars]}).decode()

    def _content(self, format: Format, ends: _Ends, depth: int) -> str:
        """Returns an expression of a format, and of the mark after it where `ends` are marks."""
        self._count(format, depth)
        match format:
            case AnyText():
                return self._text_to(ends, self._text_without(format.excludes or ()))
            case TriggeredTags():
                return self._triggered(format, ends, depth)
            case Tag() if not format.ends:
                return f"{self._marks.literal(format.begin)} {self._content(format.content, ends, depth + 1)}"
            case Sequence():
                *first, last = format.elements
                parts = [self._content(each, _Open.FORMAT, depth + 1) for each in first]
                return " ".join([*parts, self._content(last, ends, depth + 1)])
            case Either():
                return _either(self._content(each, ends, depth + 1) for each in format.elements)
        return f"{self._bounded(format, depth)} {self._end(ends)}"

    def _bounded(self, format: Format, depth: int) -> str:
        """Returns an expression of a format whose end is its own."""
        match format:
            case ConstString():
                return self._literal(format.value)
            case JsonSchema():
                schema = format.json_schema
                if schema is False:
                    raise wrong(self._param, "the schema `false` matches nothing.")
                return self._refer(of_schema({} if schema is True else schema, self._style, self._param))
            case Regex():
                return self._refer(of_regex(format.pattern))
            case GrammarText():
                return self._refer(of_grammar(format.grammar, self._param))
            case Repeated():
                return f"({self._content(format.content, _Open.FORMAT, depth + 1)}){_TIMES[format.type]}"
            case Tag():
                return self._tag(format, format.begin, depth)
            case SeparatedTags():
                return self._separated(format, depth)
        raise AssertionError(format.type)

    def _tag(self, tag: Tag, begin: str, depth: int) -> str:
        """Returns an expression of a tag of which the mark `begin` is still to come."""
        if "" in tag.ends:
            raise wrong(self._param, "an empty 'end' beside others ends nothing.")
        return f"{self._literal(begin)} {self._content(tag.content, tag.ends or _Open.FORMAT, depth + 1)}"

    def _separated(self, format: SeparatedTags, depth: int) -> str:
        tags = _either(self._tag(tag, tag.begin, depth) for tag in self._counted(format.tags, depth))
        times = "" if format.at_least_one else "?"
        if format.stop_after_first:
            return f"{tags}{times}"
        name = self._rule(tags)
        return f"({name} ({self._literal(format.separator)} {name})*){times}"

    def _triggered(self, format: TriggeredTags, ends: _Ends, depth: int) -> str:
        self._check_triggers(format, ends)
        text = self._text_without(format.excludes or ())
        bodies = self._bodies(format, depth)
        in_text = self._rule(_either(f"{self._until(trigger, text)} {body}" for trigger, body in bodies.items()))
        first = _either(f"{self._literal(trigger)} {body}" for trigger, body in bodies.items())
        if format.stop_after_first:
            if format.at_least_one:
                return f"{first} {self._end(ends)}"
            return _either([f"{in_text} {self._end(ends)}", self._text_to(ends, text)])
        return f"{first if format.at_least_one else ''} {in_text}* {self._text_to(ends, text)}"

    def _bodies(self, format: TriggeredTags, depth: int) -> dict[str, str]:
        """Returns by trigger the rule of all that goes on with it. A trigger that ends in a token is longer here."""
        going_on: dict[str, list[str]] = {}
        for tag in self._counted(format.tags, depth):
            (trigger,) = (trigger for trigger in format.triggers if tag.begin.startswith(trigger))
            longer = self._marks.whole(tag.begin, len(trigger))
            going_on.setdefault(longer, []).append(self._tag(tag, tag.begin[len(longer) :], depth))
        return {trigger: self._rule(_either(tags)) for trigger, tags in going_on.items()}

    def _check_triggers(self, format: TriggeredTags, ends: _Ends) -> None:
        for tag in format.tags:
            if (number := sum(tag.begin.startswith(trigger) for trigger in format.triggers)) != 1:
                raise wrong(self._param, f"{number} triggers begin the tag {tag.begin!r}; it must be one.")
        for trigger in format.triggers:
            if not any(tag.begin.startswith(trigger) for tag in format.tags):
                raise wrong(self._param, f"no tag begins with the trigger {trigger!r}.")
        if isinstance(ends, tuple):
            for trigger in format.triggers:
                if any(trigger in end for end in ends):
                    raise wrong(self._param, f"the trigger {trigger!r} is in the mark that ends the text around it.")

    def _text_to(self, ends: _Ends, text: str) -> str:
        """Returns an expression of a text up to its end."""
        if ends is _Open.FORMAT:
            words = "'any_text' and 'triggered_tags' end with the tag around them or with the answer: put them last."
            raise wrong(self._param, words)
        if ends is _Open.ANSWER_ENDS:
            return text
        expression, rules = self._marks.text_until(ends, text)
        self._rules += rules
        return expression

    def _end(self, ends: _Ends) -> str:
        if isinstance(ends, _Open):
            return ""
        return _either(map(self._literal, ends))

    def _until(self, trigger: str, text: str) -> str:
        expression, rules = self._marks.text_until((trigger,), text)
        self._rules += rules
        return expression

    def _text_without(self, excludes: Iterable[str]) -> str:
        """Returns the terminal of any text that has none of these strings in it."""
        if not (strings := [lark_string(each) for each in excludes]):
            return "ANY_TEXT"
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: ANY_TEXT & ~(ANY_TEXT ({' | '.join(strings)}) ANY_TEXT)")
        return name

    def _literal(self, text: str) -> str:
        return self._marks.literal(text)

    def _rule(self, expression: str) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def _refer(self, grammar: str) -> str:
        """Returns a reference to a grammar, which becomes one of this one's."""
        (only,) = grammars_of(grammar)
        name = f"part_{len(self._grammars)}"
        self._grammars.append({**only, "name": name})
        return f"@{name}"

    def _counted(self, tags: list[Tag], depth: int) -> list[Tag]:
        for tag in tags:
            self._count(tag, depth + 1)
        return tags

    def _count(self, format: Format, depth: int) -> None:
        self._num_formats += 1
        if depth > _MAX_DEPTH or self._num_formats > MAX_PARTS:
            raise wrong(self._param, f"it must have at most {MAX_PARTS} formats, {_MAX_DEPTH} deep.")


def _either(expressions: Iterable[str]) -> str:
    return "(" + " | ".join(expressions) + ")"
