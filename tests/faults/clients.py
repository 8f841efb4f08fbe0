"""Clients that read an answer to its end; each knows whether its answer was lost or wrong."""

import json
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import httpx2
import openai

from protos import inference_pb2, inference_pb2_grpc
from tests.e2e.conftest import generate
from tests.e2e.stack import Endpoint
from tests.e2e.test_pair import GREEDY, text_of

_HANGS_S = 120.0  # a client that has waited as long for its end will not see it


class Client(threading.Thread):
    """Reads the stream of one greedy answer."""

    def __init__(self, gateway: Endpoint, model: Path, prompt: list[int], num_tokens: int) -> None:
        super().__init__(daemon=True)
        self.prompt, self.num_tokens = prompt, num_tokens
        self.text = ""
        self.error: openai.APIError | None = None  # with which the gateway ended it, in words
        self.broke: Exception | None = None  # the connection ended without a word
        self.times = [time.monotonic()]  # of the request, each text, and the end
        self._gateway, self._model = gateway, model
        self.start()

    def run(self) -> None:
        """Reads until the end."""
        try:
            stream = self._gateway.client.completions.create(
                prompt=self.prompt, max_tokens=self.num_tokens, stream=True, **self._options()
            )
            for chunk in stream:
                self.text += chunk.choices[0].text
                self.times.append(time.monotonic())
        except (openai.APIConnectionError, httpx2.TransportError) as error:
            self.broke = error
        except openai.APIError as error:
            self.error = error
        finally:
            self.times.append(time.monotonic())

    def _options(self) -> dict[str, Any]:
        return dict(GREEDY)

    def is_lost(self) -> bool:
        """Waits for the end: True where there is none, or one without a word."""
        self.join(_HANGS_S)
        return self.is_alive() or self.broke is not None

    def is_wrong(self) -> bool:
        """True for text that an undisturbed run does not have; a partial answer must be how the whole one begins."""
        expected = text_of(self._model, generate(self._model, self.prompt, self.num_tokens).tokens)
        text = self.text.rstrip("\ufffd")
        if self.error is not None or self.broke is not None:
            return not expected.startswith(text)
        return text != expected

    def longest_wait_s(self, since: float) -> float:
        """The longest time without news after a moment."""
        begun = max(since, self.times[0])
        times = [moment for moment in self.times if moment > begun]
        return max((after - before for before, after in zip([begun, *times], times, strict=False)), default=0.0)


class ColdClient(Client):
    """A client whose prompt no worker has cached, whoever sent it before: load alone says where it goes."""

    def _options(self) -> dict[str, Any]:
        fields = {**GREEDY["extra_body"], "cache_salt": secrets.token_hex(8)}
        return {**GREEDY, "extra_body": fields}


class GrpcClient(Client):
    """Reads the stream of one greedy answer over gRPC."""

    def run(self) -> None:
        """Reads until the end."""
        prompt = inference_pb2.TokenIds(ids=self.prompt)
        request = inference_pb2.GenerateRequest(
            token_ids=prompt, max_tokens=self.num_tokens, temperature=0, ignore_eos=True
        )
        try:
            with grpc.insecure_channel(f"127.0.0.1:{self._gateway.grpc_port}") as channel:
                stub: Any = inference_pb2_grpc.InferenceStub(channel)
                for part in stub.Generate(request):
                    self.text += part.text
                    self.times.append(time.monotonic())
        except grpc.RpcError as error:
            self.broke = error
        finally:
            self.times.append(time.monotonic())


class BackgroundClient(Client):
    """Asks for a greedy response in the background, leaves, and reads it at another gateway when it has ended."""

    def __init__(self, gateway: Endpoint, model: Path, prompt: list[int], num_tokens: int, reader: Endpoint) -> None:
        self._reader = reader
        super().__init__(gateway, model, prompt, num_tokens)

    def run(self) -> None:
        """Polls until the end."""
        try:
            response = self._ask(background=True)
            self.text = "begun"
            while response.status in ("queued", "in_progress"):
                time.sleep(0.1)
                response = self._reader.client.responses.retrieve(response.id)
            ended = response.status in ("completed", "incomplete")  # as it is at the limit of its tokens
            self.text = response.output_text if ended else response.status
        except openai.APIError as error:
            self.broke = error
        finally:
            self.times.append(time.monotonic())

    def is_wrong(self) -> bool:
        """True where the answer to the same request, undisturbed and not in the background, is another one."""
        self.join(_HANGS_S)
        return bool(self.text != self._ask().output_text)

    def _ask(self, **fields: Any) -> Any:
        words = " ".join(map(str, self.prompt[:5]))
        gateway = self._gateway if fields else self._reader
        return gateway.client.responses.create(
            model="tiny", input=words, temperature=0, max_output_tokens=self.num_tokens, **fields
        )


class LeavingClient:
    """A client that asks for a stream, reads nothing unless told to, and leaves."""

    def __init__(self, gateway: Endpoint, prompt: list[int], num_tokens: int, **fields: object) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
        sent = json.dumps({**body, "ignore_eos": True, **fields}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(sent)}"
        self._socket = socket.create_connection(("127.0.0.1", gateway.port))
        self._socket.sendall(head.encode() + b"\r\n\r\n" + sent)

    def read(self, num_bytes: int = 1) -> bytes:
        """Waits for bytes of the answer, and takes so many at most."""
        return self._socket.recv(num_bytes)

    def leave(self) -> None:
        """Closes the connection."""
        self._socket.close()
