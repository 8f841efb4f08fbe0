"""Checkpoints for embeddings and scores, with the files that published models have beside their weights."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tests.checkpoints import edit_json, write_checkpoint
from tests.gateway.tokenizer_files import TEXT, byte_level

MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
VOCAB_SIZE = 600
QUERY_PROMPT = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
SENTENCE_PROMPTS = {"query": QUERY_PROMPT, "document": ""}  # Qwen3-Embedding's
QWEN3_RERANKER: dict[str, Any] = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}
_BERT_INPUTS = ["input_ids", "token_type_ids", "attention_mask"]
END = "<|eos|>"


def word_pieces() -> Tokenizer:
    """Like BERT's, with types of tokens in pairs."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=MARKS, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def ending_texts() -> Tokenizer:
    """Like Qwen3-Embedding's, which puts an end behind each text."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return tokenizer


def plain_texts() -> Tokenizer:
    """Like Qwen3-Reranker's, which adds nothing to a text."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def write_tokenizer(directory: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """Writes the tokenizer's files into a checkpoint."""
    tokenizer.save(str(directory / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    return directory


def write_sentence_files(directory: Path, mode: str, *, longest: int | None = None, **settings: Any) -> Path:
    """Writes the files of sentence-transformers: pooling by a mode, then vectors of length 1."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds.items())
    ]
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    _write(directory / "modules.json", modules)
    (directory / "2_Normalize").mkdir()
    (directory / "1_Pooling").mkdir()
    _write(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, **modes, "include_prompt": True})
    if longest is not None:
        _write(directory / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})
    versions = {"sentence_transformers": "2.7.0", "transformers": "4.51.0", "pytorch": "2.4.0"}
    plain: dict[str, Any] = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    _write(directory / "config_sentence_transformers.json", {"__version__": versions, **plain, **settings})
    return directory


def write_bge(directory: Path) -> Path:
    """BGE: BERT, the first token's state."""
    write_checkpoint(directory, "bert", vocab_size=VOCAB_SIZE, pad_token_id=0, num_hidden_layers=3)
    write_tokenizer(directory, word_pieces(), pad_token="[PAD]")
    return write_sentence_files(directory, "cls_token", longest=64)


def write_e5(directory: Path) -> Path:
    """E5: BERT, the mean of all states."""
    write_checkpoint(directory, "bert", seed=1, vocab_size=VOCAB_SIZE, pad_token_id=0, hidden_act="gelu_new")
    write_tokenizer(directory, word_pieces(), pad_token="[PAD]")
    return write_sentence_files(directory, "mean_tokens", longest=512)


def write_gte(directory: Path) -> Path:
    """GTE: ModernBERT, the first token's state."""
    shape: dict[str, Any] = {"local_attention": 16, "num_hidden_layers": 4, "cls_token_id": 2, "sep_token_id": 3}
    write_checkpoint(directory, "modernbert", vocab_size=VOCAB_SIZE, pad_token_id=0, **shape)
    write_tokenizer(directory, word_pieces(), pad_token="[PAD]")
    return write_sentence_files(directory, "cls_token", longest=512)


def write_qwen3(directory: Path) -> Path:
    """Qwen3-Embedding: the last token's state, behind the end of the text; padding on the left; prompts."""
    write_checkpoint(directory, "qwen3", vocab_size=VOCAB_SIZE, tie_word_embeddings=True)
    write_tokenizer(directory, ending_texts(), pad_token=END, padding_side="left")
    return write_sentence_files(directory, "lasttoken", prompts=SENTENCE_PROMPTS)


def write_bert_reranker(directory: Path) -> Path:
    """MS MARCO's MiniLM: BERT, whose head's number is the score."""
    write_checkpoint(directory, "bert-classifier", vocab_size=VOCAB_SIZE, pad_token_id=0, num_hidden_layers=3)
    edit_json(directory / "config.json", sbert_ce_default_activation_function="torch.nn.modules.linear.Identity")
    return write_tokenizer(directory, word_pieces(), pad_token="[PAD]", model_input_names=_BERT_INPUTS)


def write_qwen3_reranker(directory: Path) -> Path:
    """Qwen3-Reranker, with what its config.json needs to be one."""
    write_checkpoint(directory, "qwen3", vocab_size=VOCAB_SIZE, tie_word_embeddings=True)
    edit_json(directory / "config.json", **QWEN3_RERANKER)
    return write_tokenizer(directory, plain_texts(), pad_token=END, padding_side="left")


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
