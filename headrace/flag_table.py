"""Every flag of every role, under vLLM's names where vLLM has one, and what to say to flags of others."""

from __future__ import annotations

from headrace.flags import Flag, ForeignFlag, fraction, integer, json_object, number, port, positive, size, tokens

CONFIG = Flag("config", "YAML, TOML or JSON file of flags", metavar="FILE")
LOG_LEVEL = Flag("log-level", "how much is logged (info)", choices=("debug", "info", "warning", "error"))
INSECURE_SOCKETS = Flag(
    "insecure-sockets", "allow unencrypted tcp:// to other hosts, on a network you trust", switch=True
)
PEER_TIMEOUT = Flag("peer-timeout", "seconds of silence after which a peer is gone (10)", number)

MODEL = (
    Flag("model", "the same as MODEL", aliases=("-m",)),
    Flag("served-model-name", "names the API answers to; the first is echoed", many=True, metavar="NAME"),
    Flag("revision", "branch, tag or commit of a hub model"),
    Flag("download-dir", "where hub models are kept", metavar="DIR"),
    Flag("max-model-len", "longest prompt plus output, in tokens", tokens, aliases=("-c", "--ctx-size")),
    Flag("tokenizer", "vocabulary: the model's, or bytes for engines without a model", choices=("model", "byte")),
)

HTTP = (
    Flag("host", "address to listen on (127.0.0.1)"),
    Flag("port", "port to listen on, 0 for any free one (8000)", port),
    Flag("root-path", "path prefix that a proxy strips", metavar="PATH"),
    Flag("chat-template", "file or text of a Jinja chat template", metavar="TEMPLATE"),
    Flag("default-chat-template-kwargs", "JSON object handed to every template", json_object, metavar="JSON"),
    Flag(
        "generation-config",
        "sampling defaults: the model's own (auto), or the API's (none)",
        choices=("auto", "none"),
    ),
    Flag("strict-fields", "refuse unknown request fields", switch=True),
    Flag("scheduler-grace", "seconds without a scheduler before requests get 503 (30)", number),
    Flag("drain-timeout", "seconds that requests in flight get at the end (30)", number),
)

ENGINE = (
    Flag("engine", "what runs a step (model)", choices=("model", "scripted", "simulated")),
    Flag("engine-script", "JSON lines that a scripted engine answers from", metavar="FILE"),
    Flag("step-log", "write one JSON line a step", metavar="FILE"),
    Flag("device", "auto, cpu, cuda or cuda:N (auto)"),
    Flag("dtype", "auto is the checkpoint's (auto)", choices=("auto", "float32", "bfloat16", "float16")),
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
    Flag("ray-address", "a running Ray cluster; without one, a private head is started", metavar="ADDRESS"),
)

QUEUE = (
    Flag("max-queue-requests", "requests that may wait (1024)", positive, metavar="N"),
    Flag("max-queue-tokens", "prompt tokens that may wait (1000000)", tokens, metavar="N"),
)

SERVE = (
    *MODEL,
    *HTTP,
    Flag("frontends", "HTTP processes that share the port (1)", positive, metavar="N"),
    *LAUNCHER,
    *ENGINE,
    *QUEUE,
    PEER_TIMEOUT,
    LOG_LEVEL,
    CONFIG,
)

FRONTEND = (
    *MODEL,
    *HTTP,
    Flag("scheduler", "the scheduler's frontend socket", metavar="ADDRESS"),
    Flag("name", "instance name in headers, logs and metrics"),
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
    INSECURE_SOCKETS,
    PEER_TIMEOUT,
    LOG_LEVEL,
    CONFIG,
)

WORKERS = (
    *MODEL,
    Flag("scheduler", "the scheduler's worker socket", metavar="ADDRESS"),
    *LAUNCHER,
    *ENGINE,
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
    Flag("timeout", "seconds that one reply may take (60)", number),
    Flag("complete", "what is not offered counts as wrong", switch=True),
    CONFIG,
)

NOT_YET = "is not built yet"

FOREIGN = {
    flag.name: flag
    for flag in (
        ForeignFlag("enable-prompt-tokens-details", "always on here", accepted=True),
        ForeignFlag("enable-prefix-caching", "nothing to switch: prefix reuse is decided here", accepted=True),
        ForeignFlag("enable-auto-tool-choice", "nothing to switch: a request's tools decide", accepted=True),
        ForeignFlag("enable-chunked-prefill", "always on here", accepted=True),
        ForeignFlag("api-key", f"{NOT_YET}: keep the server on 127.0.0.1 or put a gateway before it"),
        ForeignFlag("api-key-file", f"{NOT_YET}: keep the server on 127.0.0.1 or put a gateway before it"),
        ForeignFlag("ssl-keyfile", f"{NOT_YET}: end TLS at a proxy before the server"),
        ForeignFlag("ssl-certfile", f"{NOT_YET}: end TLS at a proxy before the server"),
        ForeignFlag("ssl-ca-certs", f"{NOT_YET}: end TLS at a proxy before the server"),
        ForeignFlag("quantization", f"{NOT_YET}: a GGUF file brings its own"),
        ForeignFlag("chat-template-content-format", f"{NOT_YET}: content parts are joined to one string"),
        ForeignFlag("metrics-port", f"{NOT_YET}: metrics are at /metrics of the API port"),
        ForeignFlag("pipeline-parallel-size", "there is none; a group is --tensor-parallel-size ranks"),
        ForeignFlag("data-parallel-size", "use --groups N"),
        ForeignFlag("api-server-count", "use --frontends N"),
        ForeignFlag("distributed-executor-backend", "use --launcher ray or --launcher local"),
        ForeignFlag("kv-cache-memory-bytes", "use --kv-cache-memory"),
        ForeignFlag("num-gpu-blocks-override", "use --kv-cache-memory"),
        ForeignFlag("block-size", "there is none; blocks are 16 tokens"),
        ForeignFlag("kv-cache-dtype", "there is none; the KV cache has the model's precision"),
        ForeignFlag("swap-space", "there is none; preempted requests are recomputed"),
        ForeignFlag("cpu-offload-gb", "there is none"),
        ForeignFlag("enforce-eager", "there is none; nothing is compiled"),
        ForeignFlag("compilation-config", "there is none; nothing is compiled"),
        ForeignFlag("trust-remote-code", "there is none; a model's own code is never run"),
        ForeignFlag("tokenizer-mode", "there is none; tokenizer.json or the GGUF file's vocabulary is used"),
        ForeignFlag("hf-config-path", "there is none; config.json comes with the model"),
        ForeignFlag("hf-overrides", "there is none; edit a copy of config.json"),
        ForeignFlag("hf-token", "set HF_TOKEN in the environment"),
        ForeignFlag("load-format", "there is none; safetensors and GGUF are recognised"),
        ForeignFlag("seed", "there is none; requests carry seeds"),
        ForeignFlag("override-generation-config", "there is none; requests carry sampling parameters"),
        ForeignFlag("response-role", "there is none; answers are from the assistant"),
        ForeignFlag("max-logprobs", "there is none; at most 20"),
        ForeignFlag("scheduling-policy", "there is none; requests run by priority, then arrival"),
        ForeignFlag("uvicorn-log-level", "use --log-level"),
        ForeignFlag("disable-log-requests", "there is none; requests are not logged"),
        ForeignFlag("disable-log-stats", "there is none; numbers are at /metrics"),
        ForeignFlag("tool-call-parser", f"{NOT_YET}: tools are refused"),
        ForeignFlag("reasoning-parser", f"{NOT_YET}"),
        ForeignFlag("structured-outputs-config", f"{NOT_YET}"),
        ForeignFlag("guided-decoding-backend", f"{NOT_YET}"),
        ForeignFlag("enable-lora", f"{NOT_YET}"),
        ForeignFlag("lora-modules", f"{NOT_YET}"),
        ForeignFlag("speculative-config", f"{NOT_YET}"),
        ForeignFlag("limit-mm-per-prompt", "there is none; text only"),
        ForeignFlag("middleware", "there is none; put a proxy before the server"),
        ForeignFlag("allowed-origins", "there is none; put a proxy before the server"),
        ForeignFlag("enable-expert-parallel", "there is none; mixtures of experts are not supported"),
    )
}

FLAG_VARIABLES = frozenset(flag.variable for flag in (*SERVE, *FRONTEND, *SCHEDULER, *WORKERS, *CHAT)) - {
    LOG_LEVEL.variable
}
"""Environment variables that children of `serve` are told otherwise; how much is logged they read there themselves."""
