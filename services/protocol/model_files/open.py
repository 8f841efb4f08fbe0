"""Opens a model of any format."""

from pathlib import Path

from services.protocol.model_files.base import ModelFiles
from services.protocol.model_files.directory import HuggingFaceDirectory
from services.protocol.model_files.gguf_file import GgufFile, is_gguf


def open_model(path: Path) -> ModelFiles:
    """Opens the files of the model at `path`: a GGUF file, or a Hugging Face directory. Raises ModelError."""
    return GgufFile(path) if is_gguf(path) else HuggingFaceDirectory(path)
