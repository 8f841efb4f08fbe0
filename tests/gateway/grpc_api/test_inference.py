"""baton.v1.Inference over a real gRPC server, with a scripted generator behind it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from protos import inference_pb2, inference_pb2_grpc
from services.config import Pooling
from services.gateway.api.dialects.chat_answers import ChatModel
from services.gateway.api.generation import Delta, Expired, Failed, Overloaded, TooLarge, Unavailable, Unsupported
from services.gateway.api.grammars.structured_output import grammar_of
from services.gateway.api.requests.structured import StructuredOutputs
from services.gateway.api.runners import make_runners
from services.gateway.api.served_models import ServedModels
from services.gateway.api.side_thread import SideThread
from services.gateway.grpc_api.server import GrpcServer
from services.gateway.grpc_api.servicer import InferenceServicer
from services.gateway.listening import ListenError
from services.gateway.metrics import GatewayMetrics
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.model_output.forms import NO_FORMS, AnswerForms, find_forms
from services.gateway.text.tokenizer import Tokenizer
from services.protocol.frames import TokenLogprobs
from services.protocol.model_files.info import GenerationDefaults, ModelInfo
from services.protocol.outcomes import FinishReason
from tests.gateway.dispatch_stack import eventually
from tests.gateway.scripted_generator import Script, ScriptedGenerator, delta_per_token, one_delta
from tests.gateway.tokenizer_files import CHATML, byte_level

MODEL = "m"
MAX_MESSAGE_BYTES = 1 << 20
Code = grpc.StatusCode
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


@dataclass
class Served:
    """A gateway's gRPC side."""

    stub: Any
    channel: grpc.aio.Channel
    generator: ScriptedGenerator
    tokenizer: Tokenizer
    metrics: GatewayMetrics
    port: int

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.backend.encode(text, add_special_tokens=False).ids

    async def generate(self, **fields: Any) -> list[inference_pb2.GenerateResponse]:
        return [answer async for answer in self.stub.Generate(request(**fields), timeout=120)]

    async def refusal(self, **fields: Any) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.generate(**fields)
        return raised.value


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    if not {"text", "token_ids", "chat"} & fields.keys():
        fields["text"] = "Hi"
    return inference_pb2.GenerateRequest(**fields)


def tokenize(chat: dict[str, Any]) -> inference_pb2.TokenizeRequest:
    return inference_pb2.TokenizeRequest(chat=chat)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as running:
        yield running


@asynccontextmanager
async def serving(forms: AnswerForms = NO_FORMS, max_logprobs: int = 20) -> AsyncIterator[Served]:
    tokenizer = Tokenizer(byte_level(), {"bos_token": "<|bos|>"})
    hello = tokenizer.backend.encode("Hello", add_special_tokens=False).ids
    generator, metrics = ScriptedGenerator(Script(one_delta(hello))), GatewayMetrics(CollectorRegistry())
    model = ModelInfo(tokenizer.vocab_size, 4096, GenerationDefaults(), max_logprobs=max_logprobs)
    template = ChatTemplate(CHATML, tokenizer.special_tokens)
    runners = make_runners(ServedModels.of(model, MODEL), tokenizer, ChatModel(template, forms), generator, metrics)
    server = GrpcServer(InferenceServicer(runners, metrics, 300.0), generator, runners.side, MAX_MESSAGE_BYTES)
    port = await server.start("127.0.0.1", 0)
    beside = [asyncio.create_task(server.report_health()), asyncio.create_task(runners.processes.run())]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(inference_pb2_grpc.InferenceStub(channel), channel, generator, tokenizer, metrics, port)
    for task in beside:
        task.cancel()
    await asyncio.wait(beside)
    await server.stop(5)


def vectors(*values: list[float]) -> Script:
    """Embeddings of so many inputs, the last one first."""
    made = [
        Delta([], None, FinishReason.LENGTH, 1, choice, embedding=np.array(vector, np.float32))
        for choice, vector in enumerate(values)
    ]
    return Script(made[::-1], for_all=False)


async def test_inputs_become_embeddings_in_order(served: Served):
    served.generator.script = vectors([3, 4, 0, 0], [0, 0, 0, 2])
    answer = await served.stub.Embed(
        inference_pb2.EmbedRequest(inputs=[{"text": "Hi"}, {"token_ids": {"ids": [5, 6]}}], pooling="mean")
    )
    assert [list(embedding.values) for embedding in answer.embeddings] == [
        pytest.approx([0.6, 0.8, 0, 0]),
        pytest.approx([0, 0, 0, 1]),
    ]
    first, second = served.generator.requests[0].capsules
    assert second.token_ids.tolist() == [5, 6]
    assert first.pooling is second.pooling is Pooling.MEAN
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (len(first.token_ids) + 2, 0, 2)


async def test_an_embedding_is_shortened_and_left_as_it_is_where_the_call_says_so(served: Served):
    served.generator.script = vectors([3, 4, 0, 0])
    answer = await served.stub.Embed(
        inference_pb2.EmbedRequest(
            inputs=[{"text": "Some more text"}],
            dimensions=3,
            normalize=False,
            add_special_tokens=False,
            truncate_prompt_tokens=2,
        )
    )
    assert list(answer.embeddings[0].values) == [3, 4, 0]
    assert served.generator.requests[0].capsules[0].token_ids.tolist() == served.tokens("Some more text")[:2]


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({}, Code.INVALID_ARGUMENT, "inputs: "),
        ({"inputs": [{}]}, Code.INVALID_ARGUMENT, "inputs: "),
        ({"inputs": [{"text": ""}]}, Code.INVALID_ARGUMENT, "inputs: "),
        ({"inputs": [{"token_ids": {}}]}, Code.INVALID_ARGUMENT, "inputs: "),
        ({"inputs": [{"token_ids": {"ids": [2**31]}}]}, Code.INVALID_ARGUMENT, "inputs: "),
        ({"inputs": [{"text": "a"}], "pooling": "max"}, Code.INVALID_ARGUMENT, "pooling: "),
        ({"inputs": [{"text": "a"}], "dimensions": 5}, Code.INVALID_ARGUMENT, "dimensions: "),
        ({"inputs": [{"text": "a"}], "dimensions": 0}, Code.INVALID_ARGUMENT, "dimensions: "),
        ({"inputs": [{"text": "a"}], "model": "other"}, Code.NOT_FOUND, "model: "),
        ({"inputs": [{"text": "a"}], "cache_salt": "a b"}, Code.INVALID_ARGUMENT, "cache_salt: "),
        ({"inputs": [{"text": "a"}], "priority": -(2**31)}, Code.INVALID_ARGUMENT, "priority: "),
        ({"inputs": [{"text": "a"}], "request_id": "a b"}, Code.INVALID_ARGUMENT, "request_id: "),
        ({"inputs": [{"text": "a"}], "truncation_side": "left"}, Code.INVALID_ARGUMENT, "truncation_side: "),
    ],
)
async def test_a_bad_call_for_embeddings_names_its_field(served: Served, fields: Any, code: Code, says: str):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await served.stub.Embed(inference_pb2.EmbedRequest(**fields))
    assert raised.value.code() is code
    assert str(raised.value.details()).startswith(says)
    assert served.generator.requests == []


async def test_a_fleet_that_embeds_nothing_is_unavailable(served: Served):
    served.generator.embedding_size = 0
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await served.stub.Embed(inference_pb2.EmbedRequest(inputs=[{"text": "a"}]))
    assert raised.value.code() is Code.UNAVAILABLE
    assert "prefill workers" in str(raised.value.details())


async def test_text_and_tokens_come_as_deltas_and_the_last_has_the_usage(served: Served):
    text = "größer 日本 🙂 end"
    tokens = served.tokens(text)
    served.generator.script = Script(delta_per_token(tokens, FinishReason.LENGTH, cached_tokens=1))
    answers = await served.generate(max_tokens=100)
    assert "".join(answer.text for answer in answers) == text
    assert [token for answer in answers for token in answer.token_ids] == tokens
    assert all("\ufffd" not in answer.text for answer in answers)
    *others, last = answers
    assert last.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (
        3,
        len(tokens),
        1,
    )  # of the prompt, one is the BOS
    assert not any(answer.finish_reason or answer.HasField("usage") for answer in others)


async def test_every_parameter_reaches_the_capsule(served: Served):
    scores = [TokenLogprobs(-0.5, ()), TokenLogprobs(-0.5, ())]
    served.generator.script = Script([Delta(served.tokens("a"), None, FinishReason.LENGTH, 0, 0, scores)])
    await served.generate(
        token_ids={"ids": [5, 6, 7]},
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        seed=11,
        min_tokens=2,
        ignore_eos=True,
        stop=["x"],
        stop_token_ids=[8],
        logprobs=4,
        n=2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={6: -1.0},
        bad_words=["x"],
        prompt_logprobs=3,
    )
    assert len(served.generator.requests[0].capsules) == 2
    capsule = served.generator.requests[0].capsules[0]
    assert capsule.token_ids.tolist() == [5, 6, 7]
    sampling = capsule.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.25, 3)
    assert (sampling.min_p, sampling.seed, sampling.min_tokens, sampling.ignore_eos) == (0.125, 11, 2, True)
    assert (sampling.stop_token_ids, sampling.num_logprobs, sampling.num_prompt_logprobs) == ((8,), 4, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (sampling.logit_bias, len(sampling.bad_words)) == (((6, -1.0),), 2)


TAG = '{"format": {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ">"}}'
JSON_OPTIONS = [
    {"json": '{"properties": {}}', "disable_any_whitespace": True, "disable_additional_properties": True},
    {"json_object": True, "whitespace_pattern": ""},
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("form", "over_http"),
    [
        ({"json": '{"type":"boolean"}'}, {"json": '{"type":"boolean"}'}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": {"texts": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
        ({"grammar": 'start: "x"'}, {"grammar": 'start: "x"'}),
        ({"structural_tag": TAG}, {"structural_tag": TAG}),
        *((options, options) for options in JSON_OPTIONS),
    ],
)
async def test_structured_output_is_that_of_http(served: Served, form: dict[str, Any], over_http: dict[str, Any]):
    await served.generate(text="Hello", structured_outputs=form)
    expected, _ = grammar_of(None, StructuredOutputs.model_validate(over_http))
    assert served.generator.requests[0].capsules[0].sampling.grammar == expected


async def test_fields_of_a_newer_version_are_named(served: Served):
    request = inference_pb2.GenerateRequest(text="Hello")
    request.MergeFromString(bytes([0xF8, 0x3F, 1]))  # field 1023
    call = served.stub.Generate(request)
    async for _ in call:
        pass
    assert ("x-baton-ignored-fields", "field 1023") in tuple(await call.trailing_metadata())


async def test_structured_output_without_a_form_is_refused(served: Served):
    with pytest.raises(grpc.aio.AioRpcError, match="structured_outputs"):
        await served.generate(text="Hello", structured_outputs={})


async def test_choices_and_the_prompt_s_logprobs(served: Served):
    scores, of_older_worker = [TokenLogprobs(-0.5, ((7, -0.25),), 3)], [TokenLogprobs(-0.5, ((7, -0.25),))]
    deltas = [
        Delta(served.tokens("a"), None, FinishReason.LENGTH, 0, 1, scores),
        Delta(served.tokens("b"), None, FinishReason.LENGTH, 1, 0, of_older_worker),
    ]
    served.generator.script = Script(deltas, for_all=False)
    answers = await served.generate(token_ids={"ids": [5, 6]}, n=2, prompt_logprobs=1)
    assert [(answer.choice, answer.text) for answer in answers] == [(1, "a"), (0, "b")]
    assert [answer.HasField("usage") for answer in answers] == [False, True]
    assert [(found.logprob, found.top[0].token_id) for found in answers[0].prompt_logprobs] == [(-0.5, 7)]
    assert answers[0].prompt_logprobs[0].rank == 3
    assert not answers[1].prompt_logprobs[0].HasField("rank")
    assert answers[1].usage.completion_tokens == 2


async def test_a_token_has_at_most_128_alternatives_here():
    """Each is a message of its own, which a whole vocabulary of them would not be made of without a pause of others."""
    async with serving(max_logprobs=-1) as served:
        served.generator.script = Script(one_delta([9]), as_asked=True)
        (answer,) = await served.generate(logprobs=128, prompt_logprobs=128)
        assert len(answer.logprobs[0].top) == 128
        for name in ("logprobs", "prompt_logprobs"):
            with pytest.raises(grpc.aio.AioRpcError, match="at most 128") as refused:
                await served.generate(**{name: 129})
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_absent_parameters_are_the_model_s_and_zero_is_not_absent(served: Served):
    await served.generate()
    await served.generate(temperature=0.0)
    absent, zero = (request.capsules[0].sampling for request in served.generator.requests)
    assert (absent.temperature, absent.max_tokens, absent.num_logprobs) == (1.0, 16, None)
    assert zero.temperature == 0.0


async def test_a_chat_s_prompt_has_logprobs_where_asked_for(served: Served):
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    scores = [TokenLogprobs(-0.5, ((7, -0.25),))] * (len((await served.stub.Tokenize(tokenize(chat))).token_ids) - 1)
    served.generator.script = Script([Delta(served.tokens("a"), None, FinishReason.LENGTH, 0, 0, scores)])
    (answer,) = await served.generate(chat=chat, prompt_logprobs=1)
    assert len(answer.prompt_logprobs) == len(scores)


async def test_fields_of_vllm_reach_the_capsule(served: Served):
    await served.generate(
        token_ids={"ids": [5, 6, 7, 8]},
        truncate_prompt_tokens=2,
        truncation_side="right",
        cache_salt="salt",
        session_id="session",
        priority=-3,
        allowed_token_ids=[5, 6],
        logprob_token_ids=[6],
        logprobs=0,
    )
    (found,) = served.generator.requests
    (capsule,) = found.capsules
    assert capsule.token_ids.tolist() == [5, 6]
    assert (capsule.cache_salt, capsule.priority, found.session) == ("salt", -3, ("default", "session"))
    assert (capsule.sampling.allowed_token_ids, capsule.sampling.logprob_token_ids) == ((5, 6), (6,))


async def test_embeddings_have_a_salt_a_priority_and_an_id(served: Served):
    served.generator.script = vectors([3, 4, 0, 0], [1, 0, 0, 0])
    request = inference_pb2.EmbedRequest(
        inputs=[{"token_ids": {"ids": [5, 6, 7]}}, {"text": "Some more text"}],
        cache_salt="salt",
        priority=-3,
        request_id="mine",
        truncate_prompt_tokens=2,
        truncation_side="left",
    )
    call = served.stub.Embed(request)
    await call
    assert dict(await call.trailing_metadata())["x-request-id"] == "mine"
    (found,) = served.generator.requests
    assert found.request_id == "mine"
    assert [(capsule.cache_salt, capsule.priority) for capsule in found.capsules] == [("salt", -3)] * 2
    assert found.capsules[0].token_ids.tolist() == [6, 7]


async def test_a_message_may_name_its_call_and_metadata_come_first(served: Served):
    for metadata, expected in (((), "mine"), ((("x-request-id", "theirs"),), "theirs")):
        call = served.stub.Generate(request(request_id="mine"), metadata=metadata)
        assert [answer async for answer in call]
        assert dict(await call.trailing_metadata())["x-request-id"] == expected
        assert served.generator.requests[-1].request_id == expected
    served.generator.error = Expired("late")
    refusal = await served.refusal(request_id="mine")
    assert dict(refusal.trailing_metadata())["x-request-id"] == "mine"


async def test_an_echo_begins_with_the_prompt_and_with_its_tokens_beside_logprobs(served: Served):
    prompt, tokens = served.tokens("One two"), served.tokens(" three")
    scores = [TokenLogprobs(-0.25, ((7, -0.25),))] * (len(prompt) - 1)
    deltas = delta_per_token(tokens, logprobs=[TokenLogprobs(-0.5, ())] * len(tokens))
    deltas[0].prompt_logprobs = scores
    served.generator.script = Script(deltas)
    fields: dict[str, Any] = {"token_ids": {"ids": prompt}, "echo": True, "max_tokens": 100}
    first, *others = await served.generate(logprobs=1, **fields)
    assert "".join(answer.text for answer in (first, *others)) == "One two three"
    assert list(first.token_ids) == [*prompt, tokens[0]]
    assert (first.num_echoed, [answer.num_echoed for answer in others]) == (len(prompt), [0] * len(others))
    assert not first.logprobs[0].HasField("logprob")
    assert [entry.logprob for entry in first.logprobs[1:]] == [-0.25] * len(scores) + [-0.5]
    first, *others = await served.generate(**fields)
    assert "".join(answer.text for answer in (first, *others)) == "One two three"
    assert (list(first.token_ids), first.num_echoed) == ([tokens[0]], 0)


async def test_a_prompt_is_scored_without_any_answer(served: Served):
    prompt = served.tokens("One two")
    scores = [TokenLogprobs(-0.25, ())] * (len(prompt) - 1)
    served.generator.script = Script([Delta([9], [TokenLogprobs(-1, ())], FinishReason.LENGTH, 0, 0, scores)])
    (answer,) = await served.generate(token_ids={"ids": prompt}, echo=True, logprobs=0, max_tokens=0)
    assert (list(answer.token_ids), answer.text, answer.usage.completion_tokens) == (prompt, "One two", 0)
    assert len(answer.logprobs) == answer.num_echoed == len(prompt)


async def test_what_ended_a_choice_is_said(served: Served):
    served.generator.script = Script(one_delta(served.tokens("one STOP two")))
    (answer,) = await served.generate(stop=["STOP"], include_stop_str_in_output=True)
    assert (answer.text, answer.stop_string) == ("one STOP", "STOP")
    served.generator.script = Script(one_delta([*served.tokens("one"), 9], FinishReason.STOP))
    (answer,) = await served.generate(stop_token_ids=[9], token_ids={"ids": [5, 6]}, return_token_ids=True)
    assert (answer.stop_token_id, list(answer.prompt_token_ids)) == (9, [5, 6])
    served.generator.script = Script(one_delta([*served.tokens("one"), 1], FinishReason.STOP))
    (answer,) = await served.generate()
    assert answer.WhichOneof("stop_reason") is None


async def test_responses_wait_for_as_many_tokens_as_asked_for(served: Served):
    tokens = served.tokens("one two three four five six")
    served.generator.script = Script(delta_per_token(tokens))
    answers = await served.generate(stream_interval=4, max_tokens=100)
    sizes = [len(answer.token_ids) for answer in answers]
    assert sizes[0] == 1
    assert set(sizes[1:-1]) == {4}
    assert sum(sizes) == len(tokens)


async def test_a_chat_is_rendered_and_a_stop_string_ends_it(served: Served):
    served.generator.script = Script(delta_per_token(served.tokens("one STOP two")))
    answers = await served.generate(chat={"messages": [{"role": "user", "content": "Hi"}]}, stop=["STOP"])
    assert "".join(answer.text for answer in answers) == "one "
    assert answers[-1].finish_reason == inference_pb2.FINISH_REASON_STOP
    prompt = served.tokenizer.backend.decode(
        served.generator.requests[0].capsules[0].token_ids.tolist(), skip_special_tokens=False
    )
    assert "Hi" in prompt
    assert "assistant" in prompt
    tokenized = await served.stub.Tokenize(
        inference_pb2.TokenizeRequest(chat={"messages": [{"role": "user", "content": "Hi"}]})
    )
    assert list(tokenized.token_ids) == served.generator.requests[0].capsules[0].token_ids.tolist()


async def test_a_chat_s_reasoning_is_told_apart():
    async with serving(find_forms(None, "{{ tools }} <think></think>")) as served:
        served.generator.script = Script(delta_per_token(served.tokens("<think>Hm.</think>Yes")))
        answers = await served.generate(chat={"messages": [{"role": "user", "content": "Hi"}]})
        assert "".join(answer.reasoning for answer in answers) == "Hm."
        assert "".join(answer.text for answer in answers) == "Yes"


async def test_logprobs_come_beside_their_tokens(served: Served):
    tokens = served.tokens("ab")
    logprobs = [TokenLogprobs(-0.5, ((7, -0.25),)) for _ in tokens]
    served.generator.script = Script(delta_per_token(tokens, logprobs=logprobs))
    answers = await served.generate(logprobs=1)
    for answer in answers:
        assert len(answer.logprobs) == len(answer.token_ids) == 1
        assert answer.logprobs[0].logprob == -0.5
        assert (answer.logprobs[0].top[0].token_id, answer.logprobs[0].top[0].logprob) == (7, -0.25)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "text"),
        ({"text": ""}, "text"),
        ({"text": "word " * 2000}, "text"),
        ({"token_ids": {"ids": []}}, "token_ids"),
        ({"token_ids": {"ids": [2**32 - 1]}}, "token_ids"),
        ({"chat": {"messages": []}}, "chat.messages"),
        ({"chat": {"messages": [{"role": "", "content": "x"}]}}, "chat.messages[0].role"),
        ({"chat": {"messages": [{"role": "user", "content": "x"}]}, "logprobs": 21}, "logprobs"),
        ({"chat": {**HELLO, "template_kwargs": {"a": [float("inf")]}}}, "chat.template_kwargs"),
        ({"chat": {**HELLO, "documents": [{"a": float("nan")}]}}, "chat.documents"),
        ({"chat": {**HELLO, "template_kwargs": {"tools": None}}}, "chat.template_kwargs"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids[0]"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"cache_salt": "a b"}, "cache_salt"),
        ({"session_id": "x" * 129}, "session_id"),
        ({"request_id": "a b"}, "request_id"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "up"}, "truncation_side"),
        ({"allowed_token_ids": [100_000]}, "allowed_token_ids"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"chat": {"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}}, "chat.chat_template"),
    ],
)
async def test_a_bad_field_is_an_invalid_argument_by_its_name(served: Served, fields: dict[str, Any], param: str):
    error = await served.refusal(**fields)
    assert error.code() is Code.INVALID_ARGUMENT
    details = error.details() or ""
    assert details.startswith(f"{param}: ")
    assert not {"'prompt'", "'messages"} & set(details.split())
    assert served.generator.requests == []


async def test_a_request_without_a_prompt_is_told_which_there_are(served: Served):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        [_ async for _ in served.stub.Generate(inference_pb2.GenerateRequest())]
    assert raised.value.code() is Code.INVALID_ARGUMENT
    assert "text, token_ids, chat" in (raised.value.details() or "")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("full"), Code.RESOURCE_EXHAUSTED),
        (Unavailable("nobody"), Code.UNAVAILABLE),
        (TooLarge("large"), Code.INVALID_ARGUMENT),
        (Unsupported("no token", restricted=True), Code.INVALID_ARGUMENT),
        (Unsupported("not so", restricted=False), Code.UNIMPLEMENTED),
        (Expired("late"), Code.DEADLINE_EXCEEDED),
        (Failed("why, in words of ours"), Code.INTERNAL),
    ],
)
async def test_ends_without_an_answer_have_their_codes(served: Served, error: Any, code: grpc.StatusCode):
    served.generator.error = error
    refusal = await served.refusal()
    assert refusal.code() is code
    assert "words of ours" not in (refusal.details() or "")
    trailing = dict(refusal.trailing_metadata())
    assert ("retry-after" in trailing) == isinstance(error, Unavailable)
    assert trailing["x-request-id"]


async def test_an_unknown_model_is_not_found(served: Served):
    assert (await served.refusal(model="other")).code() is Code.NOT_FOUND
    await served.generate(model=MODEL)


async def test_a_fault_of_ours_tells_nothing(served: Served):
    served.generator.script = Script([], error=RuntimeError("secret"))
    refusal = await served.refusal()
    assert refusal.code() is Code.INTERNAL
    assert "secret" not in (refusal.details() or "")


async def test_a_message_above_the_limit_is_refused_by_its_size(served: Served):
    assert (await served.refusal(text="x" * MAX_MESSAGE_BYTES)).code() is Code.RESOURCE_EXHAUSTED
    await served.generate()


async def test_a_client_says_by_when_it_wants_its_first_token(served: Served):
    [_ async for _ in served.stub.Generate(request(), metadata=(("x-slo-ttft-ms", "250"),))]
    assert served.generator.requests[-1].ttft_slo_s == 0.25
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        [_ async for _ in served.stub.Generate(request(), metadata=(("x-slo-ttft-ms", "soon"),))]
    assert raised.value.code() is Code.INVALID_ARGUMENT


async def raw_refusal(served: Served, path: str, data: bytes) -> grpc.aio.AioRpcError:
    """Returns the error of a call with these bytes."""
    channel: Any = served.channel
    if path.endswith("Info"):
        call = channel.stream_stream(path)(iter([data]), timeout=60)
    elif path.endswith("Generate"):
        call = channel.unary_stream(path)(data, timeout=60)
    else:
        call = channel.unary_unary(path)(data, timeout=60)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await (call if path.endswith(("Check", "Tokenize")) else call.read())
    return raised.value


@pytest.mark.parametrize(
    "path",
    [
        "/baton.v1.Inference/Generate",
        "/baton.v1.Inference/Tokenize",
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_bytes_that_are_no_message_are_internal_in_words_and_one_log_line(
    served: Served, path: str, caplog: pytest.LogCaptureFixture
):
    with capture_logs() as logs:
        refusal = await raw_refusal(served, path, b"\xff\xff\xff")
    assert refusal.code() is Code.INTERNAL
    assert refusal.details() == "The bytes of this call are no message of its type."
    (line,) = logs
    assert (line["event"], line["method"]) == ("request failed", path)
    assert caplog.records == []  # gRPC's own


async def test_a_message_of_very_many_fields_is_refused_before_it_is_decoded(served: Served):
    refusal = await raw_refusal(served, "/baton.v1.Inference/Generate", b"\x22\x80\x80\x20" + b"\x0a\x00" * (1 << 18))
    assert refusal.code() is Code.INVALID_ARGUMENT
    assert "fields" in (refusal.details() or "")
    refusal = await served.refusal(token_ids={"ids": [7] * 300_000})
    assert (refusal.details() or "").startswith("token_ids: ")


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
async def test_a_client_that_leaves_ends_the_work(served: Served, how: str):
    served.generator.script = Script(delta_per_token(served.tokens("abc"))[:1], hangs=True)
    call = served.stub.Generate(request(), timeout=None if how == "cancelled" else 3.0)
    await anext(aiter(call))
    assert served.generator.running == 1
    if how == "cancelled":
        call.cancel()
    await eventually(lambda: served.generator.running == 0)
    most = 300.0 if how == "cancelled" else 4.0  # gRPC rounds what it sends up
    assert served.generator.requests[0].timeout_s <= most
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await anext(aiter(call))


async def test_models_health_and_reflection(served: Served):
    (model,) = (await served.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert (model.id, model.max_model_len) == (MODEL, 256)
    health: Any = health_pb2_grpc.HealthStub(served.channel)
    check = health_pb2.HealthCheckRequest(service="baton.v1.Inference")

    async def status() -> Any:
        return (await health.Check(check)).status

    assert await status() == health_pb2.HealthCheckResponse.SERVING
    served.generator.is_ready = False
    async with asyncio.timeout(120):
        while await status() != health_pb2.HealthCheckResponse.NOT_SERVING:
            await asyncio.sleep(0.05)

    def reflected() -> list[str]:
        with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
            pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
            return [method.name for method in pool.FindServiceByName("baton.v1.Inference").methods]

    assert await asyncio.to_thread(reflected) == ["Generate", "Embed", "Tokenize", "ListModels"]


async def test_requests_are_counted_and_carry_their_id(served: Served):
    call = served.stub.Generate(request(), metadata=(("x-request-id", "mine-1"),))
    [_ async for _ in call]
    assert dict(await call.trailing_metadata())["x-request-id"] == "mine-1"
    assert served.generator.requests[0].request_id == "mine-1"
    await served.refusal(model="other")
    rendered = served.metrics.render().decode()
    assert 'baton_requests_total{endpoint="grpc.generate",status="OK"} 1.0' in rendered
    assert 'baton_requests_total{endpoint="grpc.generate",status="NOT_FOUND"} 1.0' in rendered
    assert "baton_requests_in_flight 0.0" in rendered


async def test_a_port_in_use_is_refused_in_words(served: Served):
    server = GrpcServer(inference_pb2_grpc.InferenceServicer(), served.generator, SideThread(), MAX_MESSAGE_BYTES)
    with pytest.raises(ListenError, match="--grpc-port"):
        await server.start("127.0.0.1", served.port)
    await server.stop(5)
