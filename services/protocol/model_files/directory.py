"""A Hugging Face model directory: config.json, generation_config.json, tokenizer.json and the files beside them."""

from pathlib import Path

from services.protocol.model_files.base import ModelError, Settings, read_json_object

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
        """Returns the text of chat_template.jinja, else the template in tokenizer_config.json."""
        path = self.path / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        return _default_template(self._values("tokenizer_config.json").get("chat_template"), self.path)

    def response_template(self) -> object | None:
        """Returns the value in tokenizer_config.json."""
        return self._values("tokenizer_config.json").get("response_template")

    def _values(self, name: str) -> Settings:
        path = self.path / name
        return read_json_object(path) if path.is_file() else {}


def _default_template(value: object, directory: Path) -> str | None:
    """Returns a template, or the one named `default` of a list."""
    path = directory / "tokenizer_config.json"
    if value is None or isinstance(value, str):
        return value
    try:
        named = {entry["name"]: entry["template"] for entry in value}  # type: ignore[attr-defined]
    except (TypeError, KeyError) as error:
        raise ModelError(f"{path}: chat_template is neither a string nor a list of named templates") from error
    if "default" not in named:
        raise ModelError(f"{path}: chat_template names {sorted(named)}, but no 'default'")
    return str(named["default"])
