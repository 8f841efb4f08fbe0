"""The model of tests on several hosts."""

from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV heads, so that two ranks have different numbers of them."""
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(
        directory, "llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=96, num_hidden_layers=2
    )
    return directory
