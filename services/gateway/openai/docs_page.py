"""/docs: a page that shows /openapi.json. It needs nothing from other servers."""

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Any

import jinja2

Schema = Mapping[str, Any]

_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} entries",
    "maxItems": "at most {} entries",
    "maxProperties": "at most {} fields",
    "pattern": "matches {}",
}


def render_docs(document: Schema) -> bytes:
    """Returns the page of an OpenAPI document, as HTML in UTF-8."""
    source = files(__package__).joinpath("docs.html").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    page = template.render(info=document["info"], endpoints=_endpoints(document), objects=_objects(document))
    return page.encode()


def content_policy(page: bytes) -> str:
    """Returns the Content-Security-Policy of a page: its own styles and scripts, by their hashes, and nothing else."""

    def hashes(element: bytes) -> str:
        texts = re.findall(rb"<%b>(.*?)</%b>" % (element, element), page, re.DOTALL)
        return " ".join(f"'sha256-{b64encode(sha256(text).digest()).decode()}'" for text in texts)

    own = f"style-src {hashes(b'style')}; script-src {hashes(b'script')}"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _endpoints(document: Schema) -> Iterator[dict[str, Any]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            responses = operation["responses"]
            body = operation.get("requestBody", {"content": {}})["content"]
            yield {
                "path": path,
                "method": method.upper(),
                "summary": operation["summary"],
                "bodies": [name for content in body.values() for name in _names(content["schema"])],
                "answers": [_answer(*content) for content in responses["200"]["content"].items()],
                "errors": [status for status in responses if status != "200"],
            }


def _answer(media_type: str, content: Schema) -> dict[str, str]:
    names = _names(content["schema"])
    words = content["schema"].get("description", "")
    return {"media_type": media_type, "model": names[0] if names else "", "words": words}


def _objects(document: Schema) -> Iterator[dict[str, Any]]:
    for name, schema in document["components"]["schemas"].items():
        required = schema.get("required", ())
        yield {
            "name": name,
            "description": schema.get("description", ""),
            "open": schema.get("additionalProperties") is True,
            "fields": [
                {
                    "name": field,
                    "required": field in required,
                    "type": describe_type(value),
                    "description": value.get("description", ""),
                }
                for field, value in schema.get("properties", {}).items()
            ],
        }


def _names(schema: Schema) -> list[str]:
    return [each["$ref"].rpartition("/")[2] for each in schema.get("anyOf", [schema]) if "$ref" in each]


def describe_type(schema: Schema) -> str:
    """Says in words what values a JSON schema has."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if alternatives := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(describe_type(each) for each in alternatives)
    if "enum" in schema or "const" in schema:
        return " or ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    bounds = [words.format(schema[name]) for name, words in _BOUNDS.items() if name in schema]
    return ", ".join([_plain_type(schema), *bounds])


def _plain_type(schema: Schema) -> str:
    kind = str(schema.get("type", "any value"))
    if kind == "array" and schema.get("items"):
        return f"array of ({describe_type(schema['items'])})"
    patterns = schema.get("patternProperties", {}).values()
    entries = next(iter(patterns), schema.get("additionalProperties"))
    if kind == "object" and isinstance(entries, Mapping):
        return f"object of ({describe_type(entries)})"
    return kind
