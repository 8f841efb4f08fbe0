"""A model in one GGUF file, as `ModelFiles`. The engine reads the weights (services/engine/models)."""

import struct
from functools import cached_property
from pathlib import Path

from services.protocol.model_files.base import ModelError, Settings
from services.protocol.model_files.gguf_config import read_gguf_config, read_gguf_generation_config
from services.protocol.model_files.gguf_header import GgufHeader, read_gguf_header
from services.protocol.model_files.gguf_tokenizer import make_tokenizer, special_tokens

ROTARY_FACTORS = "rope_freqs.weight"  # a tensor that is no weight: a divisor for each frequency
_FLOAT32 = 0  # ggml's number for the type
_MAX_HEAD_DIM = 4096  # no model has wider heads


def is_gguf(path: Path) -> bool:
    """Returns True for a path with the name of a GGUF file, which need not exist."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


class GgufFile:
    """`ModelFiles` of a GGUF file. The header is read once, when it is first needed."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if there is no file."""
        self.path = path
        if not path.is_file():
            raise ModelError(f"model file {path} does not exist")

    @cached_property
    def header(self) -> GgufHeader:
        """Returns the file's header. Raises ModelError."""
        return read_gguf_header(self.path)

    def identity(self) -> tuple[bytes, ...]:
        """Returns the header's bytes: metadata, vocabulary and the list of tensors."""
        with self.path.open("rb") as file:
            return (file.read(self.header.data_start),)

    def config(self) -> Settings:
        """Returns the values of config.json for this file; dtype is bfloat16."""
        return read_gguf_config(self.header, self._rotary_factors())

    def generation_config(self) -> Settings:
        """Returns the file's recommended sampling, if it has one."""
        return read_gguf_generation_config(self.header.metadata)

    def tokenizer(self) -> bytes:
        """Returns a tokenizer.json made of the file's vocabulary."""
        return make_tokenizer(self.header)

    def tokenizer_config(self) -> Settings:
        """Returns nothing: the format has no such values."""
        return {}

    def special_tokens(self) -> dict[str, str]:
        """Returns the texts of the tokens that the file names by id."""
        return special_tokens(self.header)

    def chat_template(self) -> str | None:
        """Returns the file's default template."""
        return self.header.text("tokenizer.chat_template")

    def tool_template(self) -> str | None:
        """Returns the file's template of that name."""
        return self.header.text("tokenizer.chat_template.tool_use")

    def response_template(self) -> object | None:
        """Returns None: the format has no place for it."""
        return None

    def _rotary_factors(self) -> tuple[float, ...] | None:
        tensor = self.header.tensors.get(ROTARY_FACTORS)
        if tensor is None:
            return None
        if tensor.ggml_type != _FLOAT32 or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_HEAD_DIM:
            raise ModelError(f"{self.path.name}: {ROTARY_FACTORS} is no vector in float32 that is as long as a head")
        packed = struct.Struct(f"<{tensor.shape[0]}f")
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            content = file.read(packed.size)
        if len(content) < packed.size:
            raise ModelError(f"{self.path} is truncated: it ends inside {ROTARY_FACTORS}")
        return packed.unpack(content)
