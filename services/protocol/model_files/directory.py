"""A Hugging Face model directory: config.json, generation_config.json, tokenizer.json and the files beside them."""

from pathlib import Path

from services.protocol.model_files.base import ModelError, Settings, read_json_object

_DEFAULT, _TOOL_USE = "default", "tool_use"  # names of chat templates

# The names under which a chat template may use a special token.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class HuggingFaceDirectory:
    """`ModelFiles` of a directory."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if there is no model."""
        self.path = path
        if not path.is_dir():
            raise ModelError(f"model directory {path} does not exist")
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is not a model directory: it has no config.json")

    def identity(self) -> tuple[bytes, ...]:
        """Returns the bytes of config.json and tokenizer.json."""
        paths = (self.path / name for name in ("config.json", "tokenizer.json"))
        return tuple(path.read_bytes() if path.is_file() else b"" for path in paths)

    def config(self) -> Settings:
        """Returns the values of config.json."""
        return read_json_object(self.path / "config.json")

    def generation_config(self) -> Settings:
        """Returns the values of generation_config.json."""
        return self._values("generation_config.json")

    def tokenizer(self) -> bytes:
        """Returns the bytes of tokenizer.json."""
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{self.path} has no tokenizer.json")
        return path.read_bytes()

    def tokenizer_config(self) -> Settings:
        """Returns the values of tokenizer_config.json."""
        return self._values("tokenizer_config.json")

    def special_tokens(self) -> dict[str, str]:
        """Returns the texts in special_tokens_map.json and tokenizer_config.json; the latter wins."""
        named: dict[str, str] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            values = self._values(name)
            for key in NAMED_TOKENS:
                value = values.get(key)
                content = value.get("content") if isinstance(value, dict) else value
                if isinstance(content, str):
                    named[key] = content
        return named

    def chat_template(self) -> str | None:
        """Returns the text of chat_template.jinja, else the template in tokenizer_config.json, or its `default`."""
        if (written := self._template_file("chat_template.jinja")) is not None:
            return written
        templates = self._templates()
        if templates and _DEFAULT not in templates:
            path = self.path / "tokenizer_config.json"
            raise ModelError(f"{path}: chat_template names {sorted(templates)}, but no '{_DEFAULT}'")
        return templates.get(_DEFAULT)

    def tool_template(self) -> str | None:
        """Returns the text of additional_chat_templates/tool_use.jinja, else the template in tokenizer_config.json."""
        if (written := self._template_file("additional_chat_templates", f"{_TOOL_USE}.jinja")) is not None:
            return written
        alone = self._template_file("chat_template.jinja") is not None  # it stands for all in tokenizer_config.json
        return None if alone else self._templates().get(_TOOL_USE)

    def response_template(self) -> object | None:
        """Returns the value in tokenizer_config.json."""
        return self._values("tokenizer_config.json").get("response_template")

    def _template_file(self, *names: str) -> str | None:
        path = self.path.joinpath(*names)
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def _templates(self) -> dict[str, str]:
        """The templates of tokenizer_config.json by name; a single one is the default."""
        value = self._values("tokenizer_config.json").get("chat_template")
        if value is None or isinstance(value, str):
            return {} if value is None else {_DEFAULT: value}
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in value}
        except (TypeError, KeyError) as error:
            path = self.path / "tokenizer_config.json"
            raise ModelError(f"{path}: chat_template is neither a string nor a list of named templates") from error

    def _values(self, name: str) -> Settings:
        path = self.path / name
        return read_json_object(path) if path.is_file() else {}
