"""The settings of a load client. `baton bench` makes an option of each field, with the help text that stands here.

A field that is None was not given: what it is then depends on the workload, which refuses the fields of others.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated

KEY_VARIABLE = "BATON_API_KEY"


class EndpointName(StrEnum):
    """The way in which a server is asked."""

    TOKEN_IDS = "token-ids"
    TEXT = "text"
    CHAT = "chat"


class WorkloadName(StrEnum):
    """The workloads that need no file."""

    RANDOM = "random"
    PREFILL = "prefill"
    DECODE = "decode"
    SHARED_PREFIX = "shared-prefix"
    CONVERSATIONS = "conversations"
    STRUCTURED = "structured"
    TOOLS = "tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """The option of a setting: its help text, its group there, its bounds, its variable in the environment."""

    help: str
    metavar: str | None = None
    panel: str | None = None  # None: that of the setting before it
    min: float | None = None
    max: float | None = None
    variable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that a user says of a load."""

    url: Annotated[str, Flag(help="The server, with or without /v1.", metavar="URL", panel="Server")] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[str | None, Flag(help="The name of the model. Default: the first that the server names.")] = None
    api_key: Annotated[
        str | None,
        Flag(
            help="A key, where the server asks for one; the first, where there are several. Other users of this "
            "machine see it here, and not in the environment.",
            metavar="KEY",
            variable=KEY_VARIABLE,
        ),
    ] = field(default=None, repr=False)
    ca: Annotated[
        Path | None,
        Flag(help="The authority of an https server's certificate. Default: those of the system.", metavar="FILE"),
    ] = None
    admin_url: Annotated[
        str | None,
        Flag(
            help="The admin port of a Baton, as http://127.0.0.1:9001: handoffs and the gateway's TTFT.", metavar="URL"
        ),
    ] = None
    endpoint: Annotated[
        EndpointName | None,
        Flag(
            help="token-ids: /v1/completions with token ids; text: the same with text; chat: /v1/chat/completions. "
            "Default: token-ids for random, prefill, decode and shared-prefix and for a trace, else chat."
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        Flag(
            help="A directory with tokenizer.json, or the file, by which texts get their lengths. Default: a word "
            "counts as a token; the server's usage says how many there were.",
            metavar="DIR",
        ),
    ] = None
    stop_at_eos: Annotated[
        bool, Flag(help="Answers may end before their length: ignore_eos, which some servers refuse, is not sent.")
    ] = False
    temperature: Annotated[float, Flag(help="Of sampling.", min=0, metavar="F")] = 0.0
    extra_body: Annotated[str | None, Flag(help="Further fields of each request: a JSON object.", metavar="JSON")] = (
        None
    )
    workload: Annotated[
        WorkloadName | None,
        Flag(
            help="random: prompts and answers of --input and --output tokens, which for prefill are 462 and 16, for "
            "decode 48 and 128; shared-prefix: --groups of --members prompts each that begin alike; "
            "conversations: --turns, each with the answers before it; structured: answers by a JSON schema; "
            "tools: answers that call tools. Default: random.",
            panel="Workload",
        ),
    ] = None
    dataset: Annotated[
        Path | None,
        Flag(
            help="Prompts, and the lengths of answers, from a file in ShareGPT's format (JSON or JSON lines); with "
            "--turns also what its users say next.",
            metavar="FILE",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        Flag(
            help="Requests at the times, with the lengths and the shared blocks of a file of JSON lines in "
            "Mooncake's format: timestamp (ms), input_length, output_length, hash_ids.",
            metavar="FILE",
        ),
    ] = None
    requests: Annotated[
        int | None,
        Flag(
            help="How many; of conversations, how many of these. Default: 64; of a trace all; with --seconds, what "
            "fits.",
            min=1,
            max=1_000_000,
        ),
    ] = None
    seconds: Annotated[
        float | None,
        Flag(help="No request is sent later than this; those that are open go on to their end.", min=0.1, metavar="S"),
    ] = None
    input: Annotated[
        str | None,
        Flag(
            help="Tokens of a prompt: 256, or between two numbers, 100-400, or normal with its deviation, 256~64. "
            "Default: 256; of a turn of a conversation 64.",
            metavar="LENGTH",
        ),
    ] = None
    output: Annotated[
        str | None,
        Flag(
            help="Tokens of an answer, likewise. Default: 64, at most 512 for structured and tools; of a file what "
            "it says.",
            metavar="LENGTH",
        ),
    ] = None
    prefix: Annotated[int | None, Flag(help="Tokens that a group shares. Default: 1024.", min=1)] = None
    groups: Annotated[int | None, Flag(help="Groups of shared-prefix. Default: 4.", min=1)] = None
    members: Annotated[int | None, Flag(help="Requests of a group. Default: 16.", min=1)] = None
    turns: Annotated[int | None, Flag(help="Turns of a conversation. Default: 4.", min=1)] = None
    pause: Annotated[
        float | None, Flag(help="Between an answer and the next turn. Default: 0.", min=0, max=3600, metavar="S")
    ] = None
    schema: Annotated[
        Path | None,
        Flag(help="A JSON schema, for structured. Default: one of a person with five fields.", metavar="FILE"),
    ] = None
    longest: Annotated[
        int | None,
        Flag(help="Requests of a file with more tokens than this, prompt and answer together, are left out.", min=2),
    ] = None
    trace_block: Annotated[
        int | None, Flag(help="Tokens of a block, of which a trace has the hash. Default: 512, as Mooncake.", min=1)
    ] = None
    speed: Annotated[float | None, Flag(help="A trace is replayed so many times as fast. Default: 1.", min=0.001)] = (
        None
    )
    warmup: Annotated[
        int, Flag(help="Requests before, which are not counted; they have prompts of their own.", min=0)
    ] = 4
    seed: Annotated[int, Flag(help="Of prompts, lengths and arrivals: equal seeds, equal load.", min=0)] = 0
    highest_token_id: Annotated[int | None, Flag(help="In prompts of token ids. Default: 4000.", min=101)] = None
    rate: Annotated[
        float | None,
        Flag(
            help="Requests a second, or conversations where these have several turns, at random times (Poisson), "
            "whether or not earlier ones were answered. Default: all at once; of a trace at its times.",
            min=0.001,
            panel="Arrivals",
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        Flag(
            help="With --rate: the shape of the gamma distribution of the times between requests. 1 is Poisson, less "
            "is burstier, more is more even.",
            min=0.01,
            max=1e6,
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        Flag(
            help="Requests, or conversations, at a time. With --rate: at most, further ones wait at the client.", min=1
        ),
    ] = None
    find_rate: Annotated[
        bool,
        Flag(
            help="Searches the highest rate at which --attainment of the requests keep --slo: a run with all at "
            "once, and then --steps with rates in halves, each of --step-seconds. --rate is the first."
        ),
    ] = False
    steps: Annotated[int | None, Flag(help="Of --find-rate, at most. Default: 8.", min=1, max=50)] = None
    step_seconds: Annotated[
        float | None, Flag(help="Of --find-rate: how long a step sends. Default: 20.", min=1, metavar="S")
    ] = None
    attainment: Annotated[
        float | None,
        Flag(help="Of --find-rate: the share of requests that has to keep --slo. Default: 0.99.", min=0.01, max=1),
    ] = None
    slo: Annotated[
        str | None,
        Flag(
            help="Goodput is of requests that keep this, as ttft=500ms,itl=50ms: ttft and e2e of the request, tpot "
            "its mean time per further token, itl the 99th percentile of the times between its deltas.",
            metavar="NAME=TIME,...",
            panel="Results",
        ),
    ] = None
    timeout: Annotated[float, Flag(help="A request that is open for longer has failed.", min=0.1, metavar="S")] = 600.0
    label: Annotated[
        str | None, Flag(help="The name of the run in its reports. Default: the model's.", metavar="TEXT")
    ] = None
    json: Annotated[
        Path | None, Flag(help="Writes the figures there, and what `baton bench report` needs.", metavar="FILE")
    ] = None
    report: Annotated[Path | None, Flag(help="Writes a page with plots there, in one file.", metavar="FILE")] = None
