"""What /tokenizer_info shows of a model's files."""

import json
from pathlib import Path

from services.gateway.text.tokenizer import read_tokenizer_info
from services.protocol.model_files.open import open_model


def test_it_is_the_tokenizer_s_configuration_with_texts_of_special_tokens_and_one_template(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 1024,
        "bos_token": {"content": "<s>", "lstrip": False},
        "chat_template": [{"name": "default", "template": "a"}, {"name": "tools", "template": "b"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    shown = read_tokenizer_info(open_model(tmp_path))
    assert shown == {**config, "bos_token": "<s>", "chat_template": "a"}


def test_a_model_that_says_nothing_has_the_class_that_reads_any_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    shown = read_tokenizer_info(open_model(tmp_path))
    assert shown == {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": None}
