"""Calls of tools as rules of a grammar: in the form in which the model writes them, with arguments of their schemas."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.grammars.forms import of_grammar, of_regex, of_schema
from services.gateway.api.grammars.grammar_rules import Rules, in_pattern
from services.gateway.api.grammars.quoted_grammar import quoted_lark, quoted_regex
from services.gateway.api.grammars.tagged_arguments import TaggedArguments
from services.gateway.api.requests.form_texts import JsonStyle
from services.gateway.api.requests.tools import INPUT, CustomTool, InputGrammar, Tool
from services.gateway.text.model_output.formats import CallForm

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


def add_calls(rules: Rules, form: CallForm, tools: Sequence[Tool], *, one: bool) -> str:
    """Adds the rule of one call or more; returns its name. Raises ApiError."""
    call = _add_call(rules, form, tools)
    more = "" if one else f"({rules.text(form.separator)} {call})*"
    return rules.add("calls", f"{rules.text(form.begin)} {call} {more} {rules.text(form.end)}")


def add_text_with_calls(
    rules: Rules, form: CallForm, tools: Sequence[Tool], *, one: bool, excluded: Sequence[str] = ()
) -> str:
    """Adds the rule of any text, in which what begins like a call is one; returns its name. Raises ApiError.

    excluded: patterns of beginnings that no text has, neither the first nor one after a call.
    """
    excluded = [*excluded, *(f"(.|\\n)*{in_pattern(mark)}" for mark in form.others)]
    if form.bare:
        return _add_bare(rules, form, add_calls(rules, form, tools, one=one), excluded)
    token, trigger = rules.token(form.trigger), in_pattern(form.trigger)
    if token is None:
        rules.add("TEXT", _text_without(excluded))
        rules.add("HEAD", rf"/(.|\n)*{trigger}/{_without(excluded)}")
        head = rules.add("head[lazy]", "HEAD")
    else:
        # Where the mark is a token, letters do not spell it: the reader of calls sees only text.
        rules.add("TEXT", _text_without([rf"(.|\n)*{trigger}", *excluded]))
        head = rules.add("head", f"TEXT <[{token}]>")
    body, after = _add_body(rules, form, tools), rules.text(form.after)
    more = f"({rules.text(form.separator + form.before)} {body} {after})*" if form.begin and not one else ""
    rest = rules.text((form.begin + form.before)[len(form.trigger) :])
    rules.add("called", f"{head} {rest} {body} {after} {more} {rules.text(form.end)}")
    return rules.add("answer", f"called{'?' if one else '*'} TEXT")


def _add_bare(rules: Rules, form: CallForm, calls: str, excluded: Sequence[str]) -> str:
    """Adds the rule of calls without a mark, or of text that does not begin like one; returns its name."""
    first = re.escape(form.first_character)
    led = rf"\s*{in_pattern(form.lead)}\s*"
    # Neither white space nor the mark, however it is spelled, hides a call from its reader.
    rules.add("PLAIN", rf"/\s*[^{first}\s](.|\n)*/{_without([led + first, *excluded])}")
    rules.add("BEFORE", r"/\s+/")
    token = rules.token(form.lead)
    before = rules.add("LED", f"/{led}/") if token is None else f"BEFORE? <[{token}]> BEFORE?"
    return rules.add("answer", f"((BEFORE | {before})? {calls} | PLAIN | BEFORE)?")


def _text_without(beginnings: Sequence[str]) -> str:
    return rf"/(.|\n)*/{_without(beginnings)}"


def _without(beginnings: Sequence[str]) -> str:
    """Returns the end of a terminal that excludes texts with these beginnings."""
    return "".join(rf" & ~/({beginning})(.|\n)*/" for beginning in beginnings)


def _add_call(rules: Rules, form: CallForm, tools: Sequence[Tool]) -> str:
    body = _add_body(rules, form, tools)
    return rules.add("call", f"{rules.text(form.before)} {body} {rules.text(form.after)}")


def _add_body(rules: Rules, form: CallForm, tools: Sequence[Tool]) -> str:
    bodies = [rules.add(f"tool_{number}", _body(rules, form, tool, number)) for number, tool in enumerate(tools)]
    return rules.add("body", " | ".join(bodies))


def _body(rules: Rules, form: CallForm, tool: Tool, number: int) -> str:
    name = tool.function.name
    held_input = tool.grammar if isinstance(tool, CustomTool) else None
    if form.tagged or form.python:
        if held_input is not None:
            return _input_body(rules, form, tool, held_input, number)
        schema = dict(tool.function.parameters or NO_ARGUMENTS)
        if form.python:
            return f"{rules.text(name + '(')} {_python_arguments(rules, schema, number, tool.param)} {rules.text(')')}"
        return f"{rules.text(name + form.middle)} {TaggedArguments(rules, schema, number, tool.param).add()}"
    arguments = json_arguments(rules, tool, number)
    if form.middle:
        return f"{rules.text(name + form.middle)} {arguments}"
    opening = f'{{"{form.name}": "{name}", "{form.arguments}": '
    return f"{rules.text(opening)} {arguments} {rules.text('}')}"


def json_arguments(rules: Rules, tool: Tool, number: int) -> str:
    """Returns an expression of a call's arguments as JSON, of the tool's schema. Raises ApiError.

    An input that has a grammar is held inside its string.
    """
    if isinstance(tool, CustomTool) and tool.grammar is not None:
        held = rules.grammar(f"input_{number}", _quoted(tool.grammar, f"{tool.param}.grammar"))
        opening, closing = f'{{"{INPUT}": "', '"}'
        return f"{rules.text(opening)} {held} {rules.text(closing)}"
    schema = {"type": "object", **(tool.function.parameters or NO_ARGUMENTS)}
    return rules.grammar(f"arguments_{number}", of_schema(schema, JsonStyle(), tool.param))


def _quoted(grammar: InputGrammar, param: str) -> str:
    return (quoted_regex if grammar.syntax == "regex" else quoted_lark)(grammar.definition, param)


def _input_body(rules: Rules, form: CallForm, tool: Tool, grammar: InputGrammar, number: int) -> str:
    """Returns the body of a call whose input has a grammar: in Python inside a string, between tags as it is."""
    name, param, text = tool.function.name, f"{tool.param}.grammar", grammar.definition
    if form.python:
        held = rules.grammar(f"input_{number}", _quoted(grammar, param))
        return f"{rules.text(f'{name}({INPUT}=' + chr(34))} {held} {rules.text(chr(34) + ')')}"
    held = rules.grammar(f"input_{number}", of_regex(text) if grammar.syntax == "regex" else of_grammar(text, param))
    opening, closing = f"<parameter={INPUT}>\n", "\n</parameter>\n"
    return f"{rules.text(name + form.middle + opening)} {held} {rules.text(closing)}"


def _python_arguments(rules: Rules, schema: Mapping[str, Any], number: int, param: str) -> str:
    """Adds rules of named arguments in the order of the schema; returns the name of the first."""
    properties, required = schema.get("properties", {}), schema.get("required", ())
    plain = isinstance(properties, dict) and all(str(name).isidentifier() for name in properties)
    if not plain or b'"$ref"' in orjson.dumps(schema):
        raise _not_in_python(param)
    names = list(properties)
    rules.add(f"more_{number}_{len(names)}", '""')
    rules.add(f"first_{number}_{len(names)}", '""')
    for index in reversed(range(len(names))):
        each = of_schema(properties[names[index]], JsonStyle(), param)
        value = f"{rules.text(names[index] + '=')} {rules.grammar(f'argument_{number}_{index}', each)}"
        after, first = f"more_{number}_{index + 1}", f"first_{number}_{index + 1}"
        left_out = names[index] not in required
        rules.add(f"more_{number}_{index}", f'", " {value} {after}' + (f" | {after}" if left_out else ""))
        rules.add(f"first_{number}_{index}", f"{value} {after}" + (f" | {first}" if left_out else ""))
    return f"first_{number}_0"


def _not_in_python(param: str) -> ApiError:
    words = "this model calls functions as in Python, for which the schema must list its properties, without '$ref'."
    return invalid(f"Invalid '{param}': {words}", param, "unsupported_value")
