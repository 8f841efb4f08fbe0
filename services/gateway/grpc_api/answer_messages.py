"""Makes the messages of answers."""

from protos import inference_pb2
from services.gateway.api.answers.choice import ToolCallPart, Update, Usage
from services.gateway.api.embeddings import EmbeddingAnswer
from services.protocol.frames import TokenLogprobs

_FINISH_REASONS = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
    "tool_calls": inference_pb2.FINISH_REASON_TOOL_CALLS,
}


def response_of(update: Update, usage: Usage | None) -> inference_pb2.GenerateResponse:
    """The response with an update. usage: of all choices; None: the last one is still to come."""
    response = inference_pb2.GenerateResponse(
        text=update.text,
        reasoning=update.reasoning,
        token_ids=update.tokens,
        logprobs=[_logprobs(entry) for entry in update.logprobs or ()],
        finish_reason=_FINISH_REASONS[update.finish_reason],
        choice=update.choice,
        prompt_logprobs=[_logprobs(entry) for _, entry in update.prompt_logprobs or ()],
        prompt_token_ids=update.prompt_token_ids or (),
    )
    if update.echoed:
        response.num_echoed = len(update.echoed)
    if update.tool_calls:
        response.tool_calls.extend(map(_call_part, update.tool_calls))
    if isinstance(update.stop_reason, str):
        response.stop_string = update.stop_reason
    elif update.stop_reason is not None:
        response.stop_token_id = update.stop_reason
    if usage is not None:
        response.usage.CopyFrom(_usage(usage))
    return response


def embed_response(answer: EmbeddingAnswer) -> inference_pb2.EmbedResponse:
    """The response with the embeddings of a request."""
    return inference_pb2.EmbedResponse(
        embeddings=[inference_pb2.Embedding(values=vector.tolist()) for vector in answer.vectors],
        usage=inference_pb2.Usage(prompt_tokens=answer.prompt_tokens, cached_tokens=answer.cached_tokens),
    )


def _call_part(part: ToolCallPart) -> inference_pb2.ToolCallPart:
    return inference_pb2.ToolCallPart(call=part.call, id=part.id, name=part.name, arguments=part.arguments)


def _usage(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def _logprobs(logprobs: TokenLogprobs | None) -> inference_pb2.TokenLogprobs:
    if logprobs is None:  # the first token of an echoed prompt
        return inference_pb2.TokenLogprobs()
    top = [inference_pb2.Alternative(token_id=token, logprob=logprob) for token, logprob in logprobs.top]
    return inference_pb2.TokenLogprobs(logprob=logprobs.sampled, top=top, rank=logprobs.rank)
