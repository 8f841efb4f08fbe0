"""A model in one GGUF file, as `ModelFiles`. The weights are the engine's to read (services/engine/models)."""

import struct
from functools import cached_property
from pathlib import Path

from services.protocol.model_files.base import ModelError, Settings
from services.protocol.model_files.gguf_config import read_gguf_config, read_gguf_generation_config
from services.protocol.model_files.gguf_header import GgufHeader, read_gguf_header
from services.protocol.model_files.gguf_tokenizer import make_tokenizer, special_tokens

ROTARY_FACTORS = "rope_freqs.weight"  # a tensor that is no weight: what each frequency is divided by
_FLOAT32 = 0  # ggml's number for it
_MAX_HEAD_DIM = 4096  # no model has wider heads


def is_gguf(path: Path) -> bool:
    """True for the path of a GGUF file, by its name; it need not be there."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


class GgufFile:
    """See `ModelFiles`. The header is read once, when it is first asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError where there is no file."""
        self.path = path
        if not path.is_file():
            raise ModelError(f"model file {path} does not exist")

    @cached_property
    def header(self) -> GgufHeader:
        """All that the file says. Raises ModelError."""
        return read_gguf_header(self.path)

    def identity(self) -> tuple[bytes, ...]:
        """The header's bytes: metadata, vocabulary and the list of tensors."""
        with self.path.open("rb") as file:
            return (file.read(self.header.data_start),)

    def config(self) -> Settings:
        """The values of config.json for this file; dtype is bfloat16."""
        return read_gguf_config(self.header, self._rotary_factors())

    def generation_config(self) -> Settings:
        """The file's recommended sampling, where it has one."""
        return read_gguf_generation_config(self.header.metadata)

    def tokenizer(self) -> bytes:
        """A tokenizer.json made of the file's vocabulary."""
        return make_tokenizer(self.header)

    def special_tokens(self) -> dict[str, str]:
        """The texts of the tokens that the file names by id."""
        return special_tokens(self.header)

    def chat_template(self) -> str | None:
        """The file's default template."""
        return self.header.text("tokenizer.chat_template")

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
