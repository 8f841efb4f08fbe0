"""Pairs of texts as inputs of cross encoders, each in the form that the model was trained with."""

from services.gateway.api.dialects.embedding_inputs import FramedText, Input
from services.protocol.model_files.cross_encoder import PairForm

# The prompt of Qwen3-Reranker, by its model card.
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_BEFORE = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_TURN = "<|im_start|>"  # with it, a client's text begins a prompt of its own


def pair_input(form: PairForm, first: str, second: str, instruction: str | None) -> Input:
    """Returns a pair as one input. instruction: for JUDGED, what makes a document fit; None: the model's own.

    A first text that begins a prompt has the prompt's parts in both texts, as vLLM's clients write them.
    """
    match form:
        case PairForm.SEGMENTS:
            return first, second
        case PairForm.JUDGED if not first.startswith(_TURN):
            text = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {first}\n<Document>: {second}"
            return FramedText(_BEFORE, text, _AFTER)
        case _:
            return first + second
