"""Options and commands of other servers: what each is called here, or that it is not there yet.

Someone who comes from another server types what that server calls it. The refusal of an option that Baton does not
know says what to type instead. docs/reference.md has the same table; a test holds it to this one.
"""

from dataclasses import dataclass

_RANKS = "--tensor-parallel-size"
_STAGES = "for prefill workers: `baton up --prefill-pp N`, `baton prefill --pipeline-parallel-size N`"
_HOSTS = (
    "each machine starts workers of its own, which meet in Redis; a worker of several machines: "
    "`--world-size N --rank N --group HOST:PORT`"
)
_MORE_WORKERS = "more workers: `baton up --prefill N --decode N`, or further `baton prefill` and `baton decode`"
_ALWAYS = "needless: always on"
_OWN_TOKENIZER = "needless: the tokenizer is the model's own"
_LORA, _DRAFTS = "not there yet: LoRA", "not there yet: speculative decoding"
_MEDIA, _EXPERTS = "not there yet: multimodal input", "`--expert-parallel` with `--tensor-parallel-size N`"
_TIERS = "not there yet: host and disk tiers for KV"
_ROLE = "the command: `baton prefill`, `baton decode`"
_MODEL_LEN, _CHUNK, _FRACTION = "--max-model-len", "--max-num-batched-tokens", "--gpu-memory-fraction"


@dataclass(frozen=True, slots=True)
class Foreign:
    """An option or a command of other servers, under all of its names."""

    names: tuple[str, ...]
    servers: str  # that have it
    here: str  # a flag of Baton's, or words


def _foreign(names: str, servers: str, here: str) -> Foreign:
    return Foreign(tuple(names.split()), servers, here)


OPTIONS: tuple[Foreign, ...] = (
    _foreign("--model-path", "SGLang, Dynamo", "--model"),
    _foreign("--model-id", "TGI", "--model"),
    _foreign("-m -hf --hf-repo", "llama.cpp", "--model"),
    _foreign("--model-name", "Dynamo", "--served-model-name"),
    _foreign("-a --alias", "llama.cpp", "--served-model-name"),
    _foreign("--tokenizer --tokenizer-mode", "vLLM", _OWN_TOKENIZER),
    _foreign("--tokenizer-path", "SGLang", _OWN_TOKENIZER),
    _foreign("--trust-remote-code", "vLLM, SGLang, TGI", "never: code that comes with a model is not run"),
    _foreign("--download-dir", "vLLM, SGLang", "`HF_HOME` in the environment"),
    _foreign("--hf-token", "vLLM, llama.cpp", "`HF_TOKEN` in the environment"),
    _foreign("--generation-config", "vLLM", "--override-generation-config"),
    _foreign("--preferred-sampling-params", "SGLang", "--override-generation-config"),
    _foreign("--hf-overrides", "vLLM", "not there yet: other values than config.json has"),
    _foreign("--json-model-override-args", "SGLang", "not there yet: other values than config.json has"),
    _foreign("--runner --task", "vLLM", "needless: every model has /v1/embeddings"),
    _foreign("--is-embedding", "SGLang", "needless: every model has /v1/embeddings"),
    _foreign("--embedding --embeddings", "llama.cpp", "needless: every model has /v1/embeddings"),
    _foreign("--gpu-memory-utilization", "vLLM", _FRACTION),
    _foreign("--mem-fraction-static", "SGLang", _FRACTION),
    _foreign("--cuda-memory-fraction", "TGI", _FRACTION),
    _foreign("--kv-cache-memory-bytes --num-gpu-blocks-override", "vLLM", "--kv-memory"),
    _foreign("--max-total-tokens", "SGLang, TGI", "`--kv-memory` for a pool, `--max-model-len` for one sequence"),
    _foreign("--context-length", "SGLang", _MODEL_LEN),
    _foreign("-c --ctx-size", "llama.cpp", _MODEL_LEN),
    _foreign("--max-seq-len", "TensorRT-LLM", _MODEL_LEN),
    _foreign("--max-input-tokens --max-input-length", "TGI", _MODEL_LEN),
    _foreign("--page-size", "SGLang", "--block-size"),
    _foreign("--kv-cache-block-size", "Dynamo", "--block-size"),
    _foreign("--max-running-requests", "SGLang", "--max-num-seqs"),
    _foreign("--max-batch-size", "TGI, TensorRT-LLM", "--max-num-seqs"),
    _foreign("-np --parallel", "llama.cpp", "--max-num-seqs"),
    _foreign("--chunked-prefill-size --max-prefill-tokens", "SGLang", _CHUNK),
    _foreign("--max-batch-prefill-tokens", "TGI", _CHUNK),
    _foreign("--max-num-tokens", "TensorRT-LLM", _CHUNK),
    _foreign("-b --batch-size -ub --ubatch-size", "llama.cpp", _CHUNK),
    _foreign("--max-queued-requests", "SGLang", "--max-waiting"),
    _foreign("--max-concurrent-requests", "TGI", "--max-waiting"),
    _foreign("--enable-prefix-caching --enable-chunked-prefill", "vLLM", _ALWAYS),
    _foreign(
        "--no-enable-prefix-caching", "vLLM", "a request's `cache_salt` keeps it apart; prefixes are always cached"
    ),
    _foreign("--disable-radix-cache", "SGLang", "a request's `cache_salt` keeps it apart; prefixes are always cached"),
    _foreign("--quantize", "TGI", "--quantization"),
    _foreign("-ctk --cache-type-k -ctv --cache-type-v", "llama.cpp", "--kv-cache-dtype"),
    _foreign("-t --threads", "llama.cpp", "--num-threads"),
    _foreign("-ngl --gpu-layers --n-gpu-layers", "llama.cpp", "`--device cuda`: the whole model is on the GPU"),
    _foreign("-fa --flash-attn --jinja", "llama.cpp", _ALWAYS),
    _foreign("--seed", "vLLM", "the field `seed` of a request"),
    _foreign("--random-seed", "SGLang", "the field `seed` of a request"),
    _foreign("-tp", "vLLM", _RANKS),
    _foreign("--tp --tp-size", "SGLang, TensorRT-LLM", _RANKS),
    _foreign("--num-shard --sharded", "TGI", _RANKS),
    _foreign("-sm --split-mode -ts --tensor-split", "llama.cpp", _RANKS),
    _foreign("-pp", "vLLM", _STAGES),
    _foreign("--pp --pp-size", "SGLang, TensorRT-LLM", _STAGES),
    _foreign("-dp --data-parallel-size", "vLLM", _MORE_WORKERS),
    _foreign("--dp --dp-size", "SGLang", _MORE_WORKERS),
    _foreign("-ep --enable-expert-parallel", "vLLM", "--expert-parallel"),
    _foreign("--ep --ep-size", "SGLang, TensorRT-LLM", _EXPERTS),
    _foreign("--nnodes --node-rank", "vLLM, SGLang", _HOSTS),
    _foreign("--dist-init-addr", "SGLang", _HOSTS),
    _foreign("--cpu-offload-gb", "vLLM, SGLang", "not there yet: weights in host memory beside a GPU"),
    _foreign("--swap-space --kv-offloading-size", "vLLM", _TIERS),
    _foreign("--enable-hierarchical-cache", "SGLang", _TIERS),
    _foreign("--enable-lora --lora-modules", "vLLM", _LORA),
    _foreign("--lora-paths", "SGLang", _LORA),
    _foreign("--lora --lora-scaled", "llama.cpp", _LORA),
    _foreign("--speculative-config", "vLLM", _DRAFTS),
    _foreign("--speculative-algorithm --speculative-draft-model-path", "SGLang", _DRAFTS),
    _foreign("--speculate", "TGI", _DRAFTS),
    _foreign("-md --model-draft", "llama.cpp", _DRAFTS),
    _foreign("--limit-mm-per-prompt", "vLLM", _MEDIA),
    _foreign("--enable-multimodal", "SGLang", _MEDIA),
    _foreign("--mmproj", "llama.cpp", _MEDIA),
    _foreign("--http-host", "Dynamo", "--host"),
    _foreign("--hostname", "TGI", "--host"),
    _foreign("--http-port", "Dynamo", "--port"),
    _foreign("--prometheus-port", "TGI", "--admin-port"),
    _foreign("--enable-metrics", "SGLang", "needless: always at `--admin-port`"),
    _foreign("--metrics", "llama.cpp", "needless: always at `--admin-port`"),
    _foreign("--ssl-certfile", "vLLM, SGLang", "--tls-cert"),
    _foreign("--ssl-cert-file", "llama.cpp", "--tls-cert"),
    _foreign("--tls-cert-path", "Dynamo", "--tls-cert"),
    _foreign("--ssl-keyfile", "vLLM, SGLang", "--tls-key"),
    _foreign("--ssl-key-file", "llama.cpp", "--tls-key"),
    _foreign("--tls-key-path", "Dynamo", "--tls-key"),
    _foreign("--allowed-origins", "vLLM", "--allow-origin"),
    _foreign("--cors-allow-origin", "TGI", "--allow-origin"),
    _foreign("--api-key-file", "llama.cpp", "--keys"),
    _foreign("--tool-call-parser", "vLLM, SGLang", "--tool-parser"),
    _foreign("--dyn-tool-call-parser", "Dynamo", "--tool-parser"),
    _foreign("--dyn-reasoning-parser", "Dynamo", "--reasoning-parser"),
    _foreign("--enable-auto-tool-choice --enable-prompt-tokens-details", "vLLM", _ALWAYS),
    _foreign("--enable-cache-report", "SGLang", _ALWAYS),
    _foreign("--enable-anthropic-api", "Dynamo", _ALWAYS),
    _foreign("--chat-template-file", "llama.cpp", "--chat-template"),
    _foreign("--structured-outputs-config", "vLLM", "needless: there is one grammar engine"),
    _foreign("--grammar-backend", "SGLang", "needless: there is one grammar engine"),
    _foreign("--json-output", "TGI", "`--log-format json`"),
    _foreign("--uvicorn-log-level", "vLLM", "not there yet: levels of log lines; see --log-format"),
    _foreign("--log-level", "SGLang", "not there yet: levels of log lines; see --log-format"),
    _foreign("--enable-log-requests --disable-log-stats", "vLLM", "needless: a request is a log line without its text"),
    _foreign("--log-requests", "SGLang", "needless: a request is a log line without its text"),
    _foreign("--otlp-traces-endpoint", "vLLM, SGLang", "`OTEL_EXPORTER_OTLP_ENDPOINT` in the environment"),
    _foreign("--otlp-endpoint", "TGI", "`OTEL_EXPORTER_OTLP_ENDPOINT` in the environment"),
    _foreign("--kv-transfer-config", "vLLM", _ROLE),
    _foreign("--disaggregation-mode", "SGLang, Dynamo", _ROLE),
    _foreign("--is-prefill-worker --is-decode-worker", "Dynamo", _ROLE),
    _foreign("--disaggregation-transfer-backend", "SGLang", "--transport"),
    _foreign("--worker-urls", "SGLang", "--workers"),
    _foreign("--migration-limit", "Dynamo", "needless: requests go on elsewhere after a worker's death"),
)

COMMANDS: tuple[Foreign, ...] = (
    _foreign("serve", "vLLM, SGLang", "`baton up --model MODEL`"),
    _foreign("run", "Ollama", "`baton up --model MODEL`, then any client"),
    _foreign("pull", "Ollama", "needless: `--model ID` downloads what is missing"),
    _foreign("frontend router", "Dynamo", "`baton gateway`"),
    _foreign("worker", "Dynamo", "`baton prefill`, `baton decode`"),
    _foreign("chat complete", "vLLM", "any client of the OpenAI API, at http://127.0.0.1:8000/v1"),
    _foreign("collect-env", "vLLM", "`baton doctor`"),
    _foreign("version", "SGLang", "`baton --version`"),
    _foreign("help", "Ollama", "`baton --help`"),
)

_BY_NAME = {name: foreign for foreign in (*OPTIONS, *COMMANDS) for name in foreign.names}


def find(name: str) -> Foreign | None:
    """The option or command of other servers that has this name, in any spelling of its dashes."""
    return _BY_NAME.get(name) or _BY_NAME.get(name.replace("_", "-"))
