"""Every flag of ``vllm serve``, with what becomes of it here.

The names are those of vLLM's engine and frontend arguments as of late 2026, with the retired ones that are still found
in scripts. ``flag_table`` has those that are ours as well.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.command_line.foreign_flags import Foreign, ForeignFlag, always, list_of, same_as

NOT_YET = "is not built yet"
NO_SUCH = "there is none"
TEXT_ONLY = f"{NO_SUCH}; text only"
NO_EXPERTS = f"{NO_SUCH}; mixtures of experts are not supported"
NO_MAMBA = f"{NO_SUCH}; state-space models are not supported"
NO_OFFLOAD = f"{NO_SUCH}; weights and KV stay on their device"
NOT_COMPILED = "nothing to do: nothing is compiled"
NO_KERNEL_CHOICE = f"{NO_SUCH}; the engine chooses its kernels"
NOT_LOGGED = "nothing to do: requests are not logged"
ONE_HOST = "there is none; workers elsewhere are Ray's: give --ray-address"
GROUPS = "use --groups N: every replica is a group behind one scheduler"


def _group(answer: str, words: str, *names: str) -> Iterator[ForeignFlag]:
    """Flags with one answer. ``name=a|b`` takes the values a and b; ``words`` is what each takes."""
    for name in names:
        bare, _, neutral = name.partition("=")
        values = tuple(neutral.split("|")) if neutral else ()
        yield ForeignFlag(bare, answer, words=words, neutral=values)  # type: ignore[arg-type]


def _taken(answer: str, words: str, *names: str) -> Iterator[ForeignFlag]:
    """Flags that are taken with a notice."""
    for name in names:
        yield ForeignFlag(name, answer, words=words, accepted=True)  # type: ignore[arg-type]


_ALWAYS_ON = (
    *_taken("always on here", "none", "enable-prompt-tokens-details", "enable-chunked-prefill"),
    *_taken("always on here", "none", "enable-request-id-headers", "enable-server-load-tracking", "async-scheduling"),
    *_taken("nothing to switch: a request's tools decide", "none", "enable-auto-tool-choice"),
    *_taken("nothing to do: /docs needs nothing from elsewhere", "none", "enable-offline-docs"),
    *_taken("nothing to do: the model is text only anyway", "none", "language-model-only", "skip-mm-profiling"),
    *_taken("a model's own code is never run; supported models need none", "none", "trust-remote-code"),
    *_taken(NOT_COMPILED, "none", "enforce-eager"),
    ForeignFlag("O", NOT_COMPILED, words="none", accepted=True, aliases=("-O0", "-O1", "-O2", "-O3")),
    *_taken(NOT_LOGGED, "none", "disable-log-requests", "disable-uvicorn-access-log"),
    *_taken(NOT_LOGGED, "one", "max-log-len", "disable-access-log-for-endpoints"),
    *_taken("nothing to switch off: numbers are at /metrics", "none", "disable-log-stats"),
    *_taken("there is none to disable", "none", "disable-custom-all-reduce", "disable-cascade-attn"),
    *_taken("there is none to disable", "none", "disable-chunked-mm-input", "disable-hybrid-kv-cache-manager"),
    *_taken("there is none to disable", "none", "disable-mm-preprocessor-cache", "disable-async-output-proc"),
    *_taken("nothing to show", "none", "use-tqdm-on-load"),
)

_MAPPED = (
    ForeignFlag("data-parallel-size", GROUPS, becomes=same_as("--groups"), aliases=("-dp",)),
    ForeignFlag("api-server-count", "use --frontends N", becomes=same_as("--frontends"), aliases=("-asc",)),
    ForeignFlag(
        "distributed-executor-backend",
        "use --launcher ray or --launcher local",
        becomes=same_as("--launcher", mp="local", uni="local"),
    ),
    ForeignFlag("kv-cache-memory-bytes", "use --kv-cache-memory", becomes=same_as("--kv-cache-memory")),
    ForeignFlag("max-num-queued-reqs", "use --max-queue-requests", becomes=same_as("--max-queue-requests")),
    ForeignFlag("max-num-queued-tokens", "use --max-queue-tokens", becomes=same_as("--max-queue-tokens")),
    ForeignFlag("shutdown-timeout", "use --drain-timeout", becomes=same_as("--drain-timeout")),
    ForeignFlag("sse-keep-alive-interval", "use --ping-interval", becomes=same_as("--ping-interval")),
    ForeignFlag("allowed-origins", "use --cors-origin", becomes=list_of("--cors-origin")),
    ForeignFlag("renderer-num-workers", "use --tokenizer-threads", becomes=same_as("--tokenizer-threads")),
    ForeignFlag("h11-max-incomplete-event-size", "use --max-header-size", becomes=same_as("--max-header-size")),
    ForeignFlag("disable-fastapi-docs", "use --docs off", words="none", becomes=always("--docs", "off")),
    ForeignFlag(
        "enable-force-include-usage",
        "use --force-include-usage",
        words="none",
        becomes=always("--force-include-usage"),
    ),
    ForeignFlag(
        "uvicorn-log-level",
        "use --log-level",
        becomes=same_as("--log-level", critical="error", trace="debug"),
    ),
)

_PARALLEL = (
    ForeignFlag(
        "pipeline-parallel-size",
        "there is none; a group is --tensor-parallel-size ranks",
        neutral=("1",),
        aliases=("-pp",),
    ),
    ForeignFlag("data-parallel-size-local", GROUPS, aliases=("-dpl",)),
    ForeignFlag("data-parallel-rank", GROUPS, aliases=("-dpn",)),
    ForeignFlag("data-parallel-start-rank", GROUPS, aliases=("-dpr",)),
    ForeignFlag("data-parallel-address", GROUPS, aliases=("-dpa",)),
    ForeignFlag("data-parallel-rpc-port", GROUPS, aliases=("-dpp",)),
    ForeignFlag("data-parallel-backend", GROUPS, aliases=("-dpb",)),
    ForeignFlag("data-parallel-hybrid-lb", GROUPS, words="none", aliases=("-dph",)),
    ForeignFlag("data-parallel-external-lb", GROUPS, words="none", aliases=("-dpe",)),
    ForeignFlag("data-parallel-multi-port-external-lb", GROUPS, words="none", aliases=("-dpm",)),
    *_group(GROUPS, "one", "data-parallel-supervisor-port", "dp-sync-interval", "dp-supervisor-probe-interval-s"),
    *_group(GROUPS, "one", "dp-supervisor-probe-timeout-s", "dp-supervisor-probe-failure-threshold"),
    *_group(GROUPS, "none", "disable-nccl-for-dp-synchronization"),
    ForeignFlag("prefill-context-parallel-size", f"{NO_SUCH}", neutral=("1",), aliases=("-pcp",)),
    ForeignFlag("decode-context-parallel-size", f"{NO_SUCH}", neutral=("1",), aliases=("-dcp",)),
    *_group(NO_SUCH, "one", "dcp-comm-backend", "dcp-kv-cache-interleave-size=1", "cp-kv-cache-interleave-size=1"),
    *_group(NO_SUCH, "none", "dcp-q-replicate", "enable-batch-sharded-sampling"),
    *_group(ONE_HOST, "one", "master-addr", "master-port"),
    ForeignFlag("nnodes", ONE_HOST, neutral=("1",), aliases=("-n",)),
    ForeignFlag("node-rank", ONE_HOST, neutral=("0",), aliases=("-r",)),
    *_group("run headrace workers on the other hosts", "none", "headless"),
    *_group(NO_SUCH, "one", "distributed-timeout-seconds", "cpu-distributed-timeout-seconds"),
    *_group("use --device, or CUDA_VISIBLE_DEVICES", "many", "device-ids"),
    *_group(NO_SUCH, "none", "numa-bind", "ray-workers-use-nsight", "enable-fault-tolerance"),
    *_group(NO_SUCH, "many", "numa-bind-nodes", "numa-bind-cpus"),
    *_group("nothing to configure: a dead group is started again", "one", "fault-tolerance-config"),
    *_group(NO_SUCH, "one", "max-parallel-loading-workers", "worker-cls=auto", "worker-extension-cls"),
    *_group(NO_SUCH, "none", "worker-use-ray", "engine-use-ray"),
)

_EXPERTS = (
    ForeignFlag("enable-expert-parallel", NO_EXPERTS, words="none", aliases=("-ep",)),
    *_group(NO_EXPERTS, "none", "enable-eplb", "enable-elastic-ep", "enable-ep-weight-filter", "enable-dbo"),
    *_group(
        NO_EXPERTS, "one", "eplb-config", "expert-placement-strategy=linear", "all2all-backend", "moe-backend=auto"
    ),
    *_group(NO_EXPERTS, "one", "ubatch-size=0", "dbo-decode-token-threshold", "dbo-prefill-token-threshold"),
    *_group(NO_EXPERTS, "none", "enable-return-routed-experts", "enable-bf16x3-router-gemm"),
    *_group(NO_EXPERTS, "none", "enable-mixed-moe-lora-format", "enable-moe-shared-loras"),
)

_MODEL = (
    *_group(f"{NOT_YET}: a GGUF file brings its own", "one", "quantization-config"),
    *_group(f"{NO_SUCH}; old schemes are not read", "none", "allow-deprecated-quantization"),
    *_group(f"{NO_SUCH}; tokenizer.json or the GGUF file's vocabulary is used", "one", "tokenizer-mode=auto|hf|fast"),
    *_group(f"{NO_SUCH}; the tokenizer comes with the model", "one", "tokenizer-revision"),
    *_group(f"{NO_SUCH}; frontends need the tokenizer", "none", "skip-tokenizer-init"),
    *_group(f"{NO_SUCH}; a model's own code is never run", "one", "code-revision"),
    *_group(f"{NO_SUCH}; config.json comes with the model", "one", "hf-config-path", "config-format=auto|hf"),
    *_group(f"{NO_SUCH}; edit a copy of config.json", "one", "hf-overrides={}", "model-class-overrides={}"),
    *_group(f"{NO_SUCH}; edit a copy of config.json", "one", "rope-scaling", "rope-theta"),
    *_group("set HF_TOKEN in the environment", "one", "hf-token"),
    *_group(f"{NO_SUCH}; only generating models are served", "one", "runner=auto|generate", "task=auto|generate"),
    *_group(f"{NO_SUCH}; only generating models are served", "one", "convert=auto|none", "pooler-config"),
    *_group(f"{NO_SUCH}; only generating models are served", "one", "override-pooler-config", "diffusion-config"),
    *_group(f"{NO_SUCH}; there is one implementation", "one", "model-impl=auto|vllm"),
    *_group(f"{NO_SUCH}; requests carry seeds", "one", "seed=0|None"),
    *_group(f"{NO_SUCH}; requests carry sampling parameters", "one", "override-generation-config={}"),
    *_group(f"{NO_SUCH}; logprobs are raw", "one", "logprobs-mode=raw_logprobs"),
    *_group(f"{NO_SUCH}; a model's window is kept", "none", "disable-sliding-window"),
    *_group(f"{NO_SUCH}; prompts are text or token ids", "none", "enable-prompt-embeds"),
    *_group(NO_SUCH, "many", "logits-processors"),
    *_group(NO_SUCH, "one", "logits-processor-pattern", "override-attention-dtype", "io-processor-plugin"),
    *_group(NO_SUCH, "none", "use-fp64-gumbel", "enable-trace-replay", "enable-cumem-allocator"),
    *_group(NO_SUCH, "none", "enable-sleep-mode", "enable-nccl-comm-suspend", "calculate-kv-scales"),
    *_group(f"{NO_SUCH}; safetensors and GGUF are recognised", "one", "load-format=auto|safetensors|gguf|hf"),
    *_group(f"{NO_SUCH}; safetensors are mapped, not copied", "one", "safetensors-load-strategy=lazy"),
    *_group(f"{NO_SUCH}; safetensors are mapped, not copied", "one", "safetensors-prefetch-num-threads"),
    *_group(f"{NO_SUCH}; safetensors are mapped, not copied", "one", "safetensors-prefetch-block-size"),
    *_group(f"{NO_SUCH}; pickled weights are never read", "one", "pt-load-map-location=cpu"),
    *_group(NO_SUCH, "one", "model-loader-extra-config={}", "weight-transfer-config"),
    *_group(NO_SUCH, "many", "ignore-patterns"),
    *_group(NO_SUCH, "one", "override-neuron-config", "qlora-adapter-name-or-path"),
)

_CACHE = (
    *_group(f"{NO_SUCH}; blocks are 16 tokens", "one", "block-size=16"),
    *_group(f"{NO_SUCH}; all layers have one KV precision", "many", "kv-cache-dtype-skip-layers"),
    *_group("use --kv-cache-memory", "one", "num-gpu-blocks-override"),
    *_group(f"{NO_SUCH}; preempted requests are recomputed", "one", "swap-space=0|4", "preemption-mode=recompute"),
    *_group(f"{NO_SUCH}; block hashes are not chosen", "one", "prefix-caching-hash-algo", "prefix-match-unit"),
    *_group(NO_SUCH, "one", "prefix-cache-retention-interval", "kv-transfer-config", "kv-events-config"),
    *_group(NO_SUCH, "one", "ec-transfer-config", "ec-manager-config"),
    *_group(NO_SUCH, "none", "kv-sharing-fast-prefill"),
    *_group(NO_OFFLOAD, "one", "cpu-offload-gb=0", "kv-offloading-size", "kv-offloading-backend", "offload-backend"),
    *_group(NO_OFFLOAD, "one", "offload-group-size=0", "offload-num-in-group=1", "offload-prefetch-step"),
    *_group(NO_OFFLOAD, "many", "cpu-offload-params", "offload-params"),
    *_group(NO_MAMBA, "one", "mamba-cache-dtype=auto", "mamba-ssm-cache-dtype=auto", "mamba-block-size"),
    *_group(NO_MAMBA, "one", "mamba-cache-mode=none", "mamba-backend", "mamba-config", "mamba-ssu-algorithm"),
    *_group(NO_MAMBA, "one", "mamba-cache-philox-rounds=0", "replayssm-buffer-len", "gdn-prefill-backend"),
    *_group(NO_MAMBA, "one", "kda-prefill-backend"),
    *_group(NO_MAMBA, "none", "use-replayssm", "enable-mamba-cache-stochastic-rounding"),
)

_SCHEDULER = (
    *_group(
        "nothing to choose: requests run by priority, tenants in turn, then arrival",
        "one",
        "scheduling-policy=fcfs|priority",
    ),
    *_group("use --max-num-batched-tokens", "one", "max-num-scheduled-tokens"),
    *_group(f"{NO_SUCH}; prefills share a step's tokens", "one", "max-num-partial-prefills=1"),
    *_group(f"{NO_SUCH}; prefills share a step's tokens", "one", "max-long-partial-prefills=1"),
    *_group(f"{NO_SUCH}; one token a chunk unless a client reads slowly", "one", "stream-interval=1"),
    *_group(NO_SUCH, "one", "scheduler-cls", "scheduler-delay-factor=0.0", "prefill-schedule-interval=1"),
    *_group(f"{NO_SUCH}; the margin of free blocks is not chosen", "one", "watermark=0.0"),
    *_group(NO_SUCH, "none", "scheduler-reserve-full-isl", "use-v2-block-manager"),
    *_group(NO_SUCH, "one", "num-scheduler-steps=1", "num-lookahead-slots=0"),
)

_KERNELS = (
    *_group(f"{NO_SUCH}; nothing is compiled", "one", "compilation-config", "max-seq-len-to-capture"),
    ForeignFlag("optimization-level", NOT_COMPILED, accepted=True, aliases=("-O",)),
    ForeignFlag("compile-config", f"{NO_SUCH}; nothing is compiled", aliases=("-cc",)),
    *_group(f"{NO_SUCH}; nothing is captured", "many", "cudagraph-capture-sizes"),
    *_group(f"{NO_SUCH}; nothing is captured", "one", "max-cudagraph-capture-size"),
    ForeignFlag("attention-config", NO_KERNEL_CHOICE, aliases=("-ac",)),
    *_group(NO_KERNEL_CHOICE, "one", "attention-backend", "linear-backend=auto", "kernel-config", "ir-op-priority"),
    *_group(NO_KERNEL_CHOICE, "none", "enable-flashinfer-autotune", "enable-cutedsl-warmup"),
    *_group(NO_KERNEL_CHOICE, "none", "enable-flash-late-interaction"),
    *_group(NO_SUCH, "one", "performance-mode=balanced", "additional-config={}", "profiler-config"),
    *_group(NO_SUCH, "none", "fail-on-environ-validation"),
)

_MEDIA = (
    *_group(TEXT_ONLY, "one", "limit-mm-per-prompt={}", "media-io-kwargs={}", "mm-processor-kwargs"),
    *_group(TEXT_ONLY, "one", "mm-processor-cache-gb=0", "mm-processor-cache-type", "mm-processor-device=auto"),
    *_group(TEXT_ONLY, "one", "mm-shm-cache-max-object-size-mb", "mm-encoder-tp-mode", "mm-encoder-attn-backend"),
    *_group(TEXT_ONLY, "one", "mm-encoder-attn-dtype", "mm-encoder-fp8-scale-path", "mm-hasher-algorithm"),
    *_group(TEXT_ONLY, "one", "mm-encoder-fp8-scale-save-path", "mm-encoder-fp8-scale-save-margin"),
    *_group(TEXT_ONLY, "one", "mm-tensor-ipc", "mm-ipc-gpu-memory-gb=0", "video-pruning-rate", "video-pruning-method"),
    *_group(TEXT_ONLY, "one", "allowed-local-media-path", "default-mm-loras"),
    *_group(TEXT_ONLY, "many", "allowed-media-domains"),
    *_group(TEXT_ONLY, "none", "enable-mm-embeds", "interleave-mm-strings", "mm-encoder-only"),
    *_group(TEXT_ONLY, "none", "enable-mm-processor-stats", "mm-device-do-normalize", "trust-request-mm-kwargs"),
)

_LORA = (
    *_group(NOT_YET, "none", "enable-lora", "fully-sharded-loras", "specialize-active-lora", "enable-lora-bias"),
    *_group(NOT_YET, "none", "enable-tower-connector-lora"),
    *_group(NOT_YET, "one", "max-loras", "max-lora-rank", "max-cpu-loras", "lora-dtype", "lora-extra-vocab-size"),
    *_group(NOT_YET, "many", "lora-modules", "lora-target-modules", "prompt-adapters"),
)

_LATER = (
    *_group(f"{NOT_YET}: tools are refused", "one", "tool-call-parser", "tool-parser-plugin", "tool-server"),
    *_group(f"{NOT_YET}: tools are refused", "none", "exclude-tools-when-tool-choice-none"),
    *_group(NOT_YET, "one", "tool-strict-level", "reasoning-parser", "reasoning-parser-plugin", "reasoning-config"),
    *_group(NOT_YET, "one", "reasoning-effort-map", "structured-outputs-config", "guided-decoding-backend=auto"),
    *_group(NOT_YET, "none", "enable-reasoning", "guided-decoding-disable-fallback"),
    ForeignFlag("speculative-config", NOT_YET, aliases=("-sc",)),
    *_group(NOT_YET, "one", "spec-method", "spec-model", "spec-tokens", "speculative-model", "num-speculative-tokens"),
    *_group(NOT_YET, "one", "otlp-traces-endpoint"),
    *_group(NOT_YET, "many", "collect-detailed-traces"),
)

_FRONTEND = (
    *_group(f"{NO_SUCH}; answers are from the assistant", "one", "response-role=assistant"),
    *_group(f"{NO_SUCH}; put a proxy before the server", "one", "middleware", "uds", "allowed-methods", "ssl-ciphers"),
    *_group(
        "nothing to choose: every header is allowed to the origins of --cors-origin", "one", 'allowed-headers=["*"]'
    ),
    *_group("there is none; keys travel in headers, not in cookies", "none", "allow-credentials"),
    *_group("there is none; restart the frontends one by one", "none", "enable-ssl-refresh"),
    *_group("use --max-header-size", "one", "h11-max-header-count"),
    *_group("use POST /v1/chat/completions/render", "none", "enable-tokenizer-info-endpoint"),
    *_group(
        f"{NO_SUCH}; the fingerprint is the engine's numerics", "one", "fingerprint-mode=hash", "fingerprint-value"
    ),
    *_group(f"{NO_SUCH}; send token ids to /v1/completions with return_token_ids", "none", "tokens-only"),
    *_group(f"{NO_SUCH}; requests are not logged", "none", "enable-log-requests", "enable-log-outputs"),
    *_group(f"{NO_SUCH}; requests are not logged", "none", "enable-log-deltas", "aggregate-engine-logging"),
    *_group("use --log-level", "one", "log-config-file"),
    *_group("use --log-level debug", "none", "log-error-stack", "enable-logging-iteration-details"),
    *_group(f"{NO_SUCH}; numbers are at /metrics", "none", "enable-per-request-metrics", "kv-cache-metrics"),
    *_group(f"{NO_SUCH}; numbers are at /metrics", "none", "cudagraph-metrics", "enable-mfu-metrics"),
    *_group(f"{NO_SUCH}; numbers are at /metrics", "one", "kv-cache-metrics-sample", "show-hidden-metrics-for-version"),
    *_group(f"{NO_SUCH}; numbers are at /metrics", "one", "per-request-spec-decode-metrics=none"),
    *_group(NO_SUCH, "none", "enable-layerwise-nvtx-tracing", "jit-monitor-verbose", "grpc"),
    *_group(NO_SUCH, "one", "jit-monitor-mode", "cohere-format", "disable-frontend-multiprocessing"),
    *_group(NO_SUCH, "none", "cohere-is-reasoning-model", "enable-scale-out"),
)

FOREIGN = Foreign(
    (
        *_ALWAYS_ON,
        *_MAPPED,
        *_PARALLEL,
        *_EXPERTS,
        *_MODEL,
        *_CACHE,
        *_SCHEDULER,
        *_KERNELS,
        *_MEDIA,
        *_LORA,
        *_LATER,
        *_FRONTEND,
    )
)
"""What no role has a flag for. A role's own flags come first."""
