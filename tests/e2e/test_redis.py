"""Processes that know of each other through Redis alone; HTTP and gRPC clients of one gateway."""

from pathlib import Path

import grpc

from protos import inference_pb2, inference_pb2_grpc
from tests.e2e.conftest import clear_prompt, generate
from tests.e2e.stack import Gateway, running_stack, wait_until
from tests.e2e.test_pair import GREEDY, text_of, until_handed_off
from tests.redis_server import running_redis

NUM_TOKENS = 12


def complete_over_grpc(gateway: Gateway, prompt: list[int]) -> list[inference_pb2.GenerateResponse]:
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt), max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True
        )
        return list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=300))


def test_workers_meet_in_redis_and_one_gateway_profits_from_another(llama: Path, tmp_path: Path):
    prompt = clear_prompt(llama, 71, 100, NUM_TOKENS)
    expected = generate(llama, prompt, NUM_TOKENS)
    with running_redis(tmp_path) as server, running_stack(llama, redis_url=server.url) as stack:
        first = stack.gateway

        def complete() -> str:
            answer = first.client.completions.create(prompt=prompt, max_tokens=NUM_TOKENS, **GREEDY)
            return str(answer.choices[0].text)

        assert until_handed_off(first, 1, complete).rstrip("\ufffd") == text_of(llama, expected.tokens)
        answers = until_handed_off(first, 1, lambda: complete_over_grpc(first, prompt))
        assert [token for answer in answers for token in answer.token_ids] == expected.tokens
        assert answers[-1].usage.cached_tokens == 96

        with stack.serving() as second:  # it has seen no prompt
            complete_over_grpc(second, prompt)
            assert second.metric("baton_cached_tokens_predicted_total") == 96

        stack.workers["decode-0"].kill()
        stack.start("decode-0")
        wait_until(lambda: first.num_connected() == 2, 240, "the restarted worker's connection")
        assert [token for answer in complete_over_grpc(first, prompt) for token in answer.token_ids] == expected.tokens
        first.wait_for_baseline()
