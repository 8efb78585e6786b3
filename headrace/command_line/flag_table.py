"""Every flag of every role, under vLLM's names where vLLM has one, and what to say to flags of others."""

from __future__ import annotations

from headrace.command_line.flags import (
    Flag,
    alternatives,
    cert_reqs,
    dtype,
    fraction,
    generation_config,
    integer,
    json_object,
    number,
    port,
    positive,
    quantization,
    size,
    size_or_zero,
    tokenizer,
    tokens,
    tokens_or_zero,
)
from headrace.command_line.vllm_flags import FOREIGN

__all__ = ["CHAT", "DOCTOR", "FOREIGN", "FRONTEND", "LINT", "SCHEDULER", "SERVE", "WORKERS"]

CONFIG = Flag("config", "YAML, TOML or JSON file of flags", metavar="FILE")
LOG_LEVEL = Flag("log-level", "how much is logged (info)", choices=("debug", "info", "warning", "error"))
INSECURE_SOCKETS = Flag(
    "insecure-sockets", "allow unencrypted tcp:// to other hosts, on a network you trust", switch=True
)
KEYS = Flag("keys", "folder of keys that encrypt tcp:// sockets; `headrace keys` makes one", metavar="DIR")
PEER_TIMEOUT = Flag("peer-timeout", "seconds of silence after which a peer is gone (10)", number)

MODEL = (
    Flag("model", "the same as MODEL", aliases=("-m",)),
    Flag("served-model-name", "names the API answers to; the first is echoed", many=True, metavar="NAME"),
    Flag("revision", "branch, tag or commit of a hub model"),
    Flag("download-dir", "where hub models are kept", metavar="DIR"),
    Flag("max-model-len", "longest prompt plus output, in tokens", tokens, aliases=("-c", "--ctx-size")),
    Flag("tokenizer", "vocabulary: the model's, or byte for engines without a model", tokenizer, metavar="model|byte"),
)

PREFIX_CACHING = Flag(
    "enable-prefix-caching",
    "requests that begin alike share what was computed (on)",
    switch=True,
    negatable=True,
    key="prefix_caching",
)

HTTP = (
    Flag("host", "address to listen on (127.0.0.1; 0.0.0.0 with keys)"),
    Flag("port", "port to listen on, 0 for any free one (8000)", port),
    Flag("root-path", "path prefix that a proxy strips", metavar="PATH"),
    Flag("scheduler-grace", "seconds without a scheduler before requests get 503 (30)", number),
    Flag("drain-timeout", "seconds that requests in flight get at the end (30)", number),
    Flag("keep-alive", "seconds an idle connection is kept (75)", number),
    Flag("max-body-size", "largest request body (8MiB)", size, metavar="SIZE", key="max_body_bytes"),
    Flag("max-bodies-size", "all bodies being read or prepared (64MiB)", size, metavar="SIZE", key="max_bodies_bytes"),
    Flag("max-preparing", "requests held, rendered or tokenised at once in a frontend (1024)", positive, metavar="N"),
    Flag("tokenizer-threads", "threads of a frontend that render and tokenise (2)", positive, metavar="N"),
    Flag("max-header-size", "largest request line and headers (16KiB)", size, metavar="SIZE", key="max_header_bytes"),
)

ACCESS = (
    Flag(
        "api-key",
        "keys that open the API; better in HEADRACE_API_KEY or a file",
        many=True,
        metavar="KEY",
        guards=True,
    ),
    Flag("api-key-file", "file of keys, one a line, bare or as JSON objects", metavar="FILE", guards=True),
    Flag("prefix-share", "whose prompts share cached prefixes (key)", choices=("key", "tenant", "all")),
    Flag("metrics-public", "/metrics needs no key", switch=True),
    Flag("metrics-port", "a port of its own for /metrics, open to all; the next ones for more frontends", port),
    Flag("metrics-host", "address of that port (127.0.0.1)"),
    Flag("docs", "who may read /docs and /openapi.json (key)", choices=("public", "key", "off")),
    Flag("cors-origin", "origins whose pages may call the API; * for all", many=True, key="cors_origins"),
    Flag("ssl-certfile", "certificate chain; the API is https then", metavar="FILE"),
    Flag("ssl-keyfile", "its key, when it is a file of its own", metavar="FILE"),
    Flag("ssl-ca-certs", "whose client certificates are good", metavar="FILE"),
    Flag("ssl-cert-reqs", "client certificates: 0 none, 1 optional, 2 required (0)", cert_reqs, metavar="N"),
)

ANSWERS = (
    Flag("chat-template", "file or text of a Jinja chat template", metavar="TEMPLATE"),
    Flag(
        "chat-template-content-format",
        "how templates get contents (auto)",
        choices=("auto", "string", "openai"),
    ),
    Flag("default-chat-template-kwargs", "JSON object handed to every template", json_object, metavar="JSON"),
    Flag("trust-request-chat-template", "requests may bring their own template", switch=True),
    Flag("allow-special-tokens-in-content", "special-token text of users is special tokens", switch=True),
    Flag(
        "generation-config",
        "sampling defaults: the model's own (auto), or the API's (none)",
        generation_config,
        metavar="auto|none",
    ),
    Flag("strict-fields", "refuse unknown request fields", switch=True),
    Flag("strict-limits", "refuse output limits beyond the context instead of clamping them", switch=True),
    Flag("max-logprobs", "most alternatives a token (20)", alternatives, metavar="N"),
    Flag("return-tokens-as-token-ids", "logprobs name tokens token_id:N", switch=True),
    Flag("force-include-usage", "every stream ends with usage", switch=True),
    Flag("separate-finish-chunk", "finish_reason always rides on an empty delta", switch=True),
    Flag("early-commit", "seconds until a stream's status is sent without a token (10)", number),
    Flag("ping-interval", "seconds of silence before a comment keeps a stream alive (15)", number),
)

ENGINE = (
    Flag("engine", "what runs a step (model)", choices=("model", "scripted", "simulated")),
    Flag("engine-script", "JSON lines that a scripted engine answers from", metavar="FILE"),
    Flag("step-log", "write one JSON line a step", metavar="FILE"),
    Flag("device", "auto, cpu, cuda or cuda:N (auto)"),
    Flag(
        "dtype",
        "auto is the checkpoint's; on CPUs GGUF's types stay as they are (auto)",
        dtype,
        metavar="auto|float32|bfloat16|float16",
    ),
    Flag(
        "quantization",
        "int8: weights of a scale per channel, on CPUs; a GGUF file brings its own (none)",
        quantization,
        aliases=("-q",),
        metavar="none|gguf|int8",
    ),
    Flag("kv-cache-dtype", "int8: half the KV memory, on CPUs (auto)", choices=("auto", "bfloat16", "int8")),
    Flag("tensor-parallel-size", "ranks a group", positive, aliases=("--tp", "-tp"), metavar="N"),
    Flag("gpu-memory-utilization", "share of a GPU's memory that headrace may use (0.9)", fraction),
    Flag("kv-cache-memory", "KV pool of a group, as 512MiB or 4GB", size, metavar="SIZE"),
    Flag("max-num-seqs", "sequences that step together", positive, aliases=("-np", "--parallel"), metavar="N"),
    Flag("max-num-batched-tokens", "tokens of one step", tokens, metavar="N"),
    Flag("threads", "CPU threads of a rank (what the process may use)", positive, aliases=("-t",)),
    Flag("gpu-layers", "llama.cpp's: 0 is --device cpu, all else --device auto", integer, ("-ngl", "--n-gpu-layers")),
)

LAUNCHER = (
    Flag("launcher", "how ranks are started (ray)", choices=("ray", "local")),
    Flag("groups", "replicas of the model, N or MIN:MAX (1)", metavar="N"),
    Flag("cache-limit", "what is kept of former models at a start (20GiB)", size, metavar="SIZE"),
    Flag("ray-address", "a running Ray cluster; without one, a private head is started", metavar="ADDRESS"),
)

QUEUE = (
    Flag("exact-wait", "seconds that an answer waits for a group that continues it exactly (60)", number),
    Flag("exact-only", "answers that no group can continue exactly fail", switch=True),
    Flag("max-queue-requests", "requests that may wait (1024)", positive, metavar="N"),
    Flag("max-queue-tokens", "prompt tokens that may wait (1000000)", tokens, metavar="N"),
    Flag("max-queue-seconds", "longest wait before a request is refused after all (0: any)", number),
    Flag("priority-aging", "seconds of waiting that are worth one level of priority (10; 0: never)", number),
    Flag("tenant-quantum", "tokens that a tenant gets whenever its turn comes (2048)", positive, metavar="N"),
    Flag("prefill-stretch", "longest step with decodes and prefill, in times of decodes alone (4; 0: any)", number),
    Flag(
        "long-prefill-token-threshold",
        "most tokens of one prompt in a step with others (0: any)",
        tokens_or_zero,
        metavar="N",
        key="long_prefill_threshold",
    ),
)

TRACE = (
    Flag("trace-memory", "memory for the scheduler's last steps, 0 for none (16MiB)", size_or_zero, metavar="SIZE"),
    Flag("trace-dir", "where SIGUSR1 has the scheduler write them (the system's temporary files)", metavar="DIR"),
)

SERVE = (
    *MODEL,
    *HTTP,
    *ACCESS,
    *ANSWERS,
    Flag("frontends", "HTTP processes that share the port (1)", positive, metavar="N"),
    *LAUNCHER,
    *ENGINE,
    *QUEUE,
    *TRACE,
    PREFIX_CACHING,
    PEER_TIMEOUT,
    LOG_LEVEL,
    CONFIG,
)

FRONTEND = (
    *MODEL,
    *HTTP,
    *ACCESS,
    *ANSWERS,
    Flag("scheduler", "the scheduler's frontend socket", metavar="ADDRESS"),
    Flag("name", "instance name in headers, logs and metrics"),
    PREFIX_CACHING,
    KEYS,
    INSECURE_SOCKETS,
    PEER_TIMEOUT,
    LOG_LEVEL,
    CONFIG,
)

SCHEDULER = (
    Flag("frontend-bind", "socket for frontends, tcp://HOST:5570 or ipc://PATH", metavar="ADDRESS"),
    Flag("worker-bind", "socket for workers, tcp://HOST:5571 or ipc://PATH", metavar="ADDRESS"),
    Flag("metrics-port", "port of a metrics server of its own (none)", port),
    Flag("metrics-host", "address of that server (127.0.0.1)"),
    Flag("drain-timeout", "seconds that requests in flight get at the end (30)", number),
    *QUEUE,
    *TRACE,
    PREFIX_CACHING,
    KEYS,
    INSECURE_SOCKETS,
    PEER_TIMEOUT,
    LOG_LEVEL,
    CONFIG,
)

WORKERS = (
    *MODEL,
    Flag("scheduler", "the scheduler's worker socket", metavar="ADDRESS"),
    Flag("drain-timeout", "seconds that a group which is told to end gets for what it runs (30)", number),
    *LAUNCHER,
    *ENGINE,
    KEYS,
    INSECURE_SOCKETS,
    PEER_TIMEOUT,
    LOG_LEVEL,
    CONFIG,
)

CHAT = (
    Flag("url", "the server (http://127.0.0.1:8000)"),
    Flag("model", "which model, when the server has several", aliases=("-m",)),
    Flag("system", "a system message", metavar="TEXT"),
    Flag("temperature", "sampling temperature (the server's default)", number),
    Flag("top-p", "nucleus (the server's default)", fraction),
    Flag("max-tokens", "longest answer", positive),
    Flag("seed", "the same answer every time", integer),
    Flag("api-key", "key to send"),
    CONFIG,
)

LINT = (
    Flag("url", "base URL of the server, also as first word"),
    Flag("model", "which model (the first that the server lists)", aliases=("-m",)),
    Flag("api-key", "key to send; with one the rules on keys are judged too"),
    Flag("only", "areas, or AREA/NAME", many=True, metavar="AREA"),
    Flag("json", "also write the verdicts there", metavar="PATH"),
    Flag("concurrency", "checks at once (4)", positive),
    Flag("timeout", "longest wait for a byte, in seconds (120)", number),
    Flag("complete", "what is not offered counts as wrong", switch=True),
    CONFIG,
)

DOCTOR = (
    *(flag for flag in MODEL if flag.name in ("model", "revision", "download-dir", "tokenizer")),
    *(flag for flag in ANSWERS if flag.name in ("chat-template", "chat-template-content-format")),
    *(flag for flag in ANSWERS if flag.name == "default-chat-template-kwargs"),
    CONFIG,
)

FLAG_VARIABLES = frozenset(flag.variable for flag in (*SERVE, *FRONTEND, *SCHEDULER, *WORKERS, *CHAT)) - {
    LOG_LEVEL.variable
}
"""Environment variables that children of `serve` are told otherwise; how much is logged they read there themselves."""
