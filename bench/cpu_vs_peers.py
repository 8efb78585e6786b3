"""headrace's CPU engine beside vLLM-CPU and llama.cpp: the same clients, in alternation, on the same machine.

    python bench/cpu_vs_peers.py [--json PATH] [--rounds N] [--scale F] [--only NAME …]
        [--vllm VENV] [--llama-server PROGRAM] [--llama-model NAME=FILE …]

headrace runs the default model as its file has it (4-bit), in bfloat16 and in int8. ``--vllm`` is a virtual environment
with vllm-cpu; it gets the model decoded to a bfloat16 directory. ``--llama-server`` is llama.cpp's server; it gets the
default model's file and those of ``--llama-model``, such as bf16=FILE and q8_0=FILE. Peers that are not named are left
out.

Each round visits every load and, for each, every server in turn: what disturbs the machine disturbs all. The table has
medians over rounds; ratios are of medians. "cores" is what the server got of the machine, and "per core" its tokens per
second of CPU time: on a busy machine that is the fairer number, as far as nobody spins.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # not this file's folder: there `scheduler` would be another file

from bench.closed_loop import Load, Measured, run  # noqa: E402
from bench.servers import Server, started  # noqa: E402
from headrace.model_files.artefacts import default_model, load_artefacts  # noqa: E402

LOADS = (
    Load("c=1", 1, 4, 98, 128),
    Load("c=8", 8, 16, 98, 128),
    Load("c=32", 32, 64, 98, 128),
    Load("c=64", 64, 128, 98, 128),
    Load("prefill", 4, 12, 690, 4),
    Load("shared prefix", 16, 48, 40, 32, shared_words=480),
    Load("unique prompts", 16, 48, 520, 32),
)
HEADRACE = {
    "headrace 4-bit": [],
    "headrace bf16": ["--dtype", "bfloat16"],
    "headrace int8": ["--quantization", "int8", "--kv-cache-dtype", "int8"],
}
HEADRACE_ROLES = ("frontend", "scheduler", "workers", "worker-rank")


def main() -> int:
    parser = argparse.ArgumentParser(description="headrace's CPU engine beside its peers.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the requests of each load")
    parser.add_argument("--loads", nargs="*", default=[load.name for load in LOADS])
    parser.add_argument("--only", nargs="*", help="servers to start, by name")
    parser.add_argument("--vllm", type=Path, help="virtual environment with vllm-cpu")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--llama-model", nargs="*", default=[], metavar="NAME=FILE")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # and the servers with it
    loads = [scaled(load, options.scale) for load in LOADS if load.name in options.loads]
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        servers = [stack.enter_context(server) for server in chosen(options, folder)]
        for server in servers:  # kernels, caches and compilers are warm before anything counts
            measure(server, replace(loads[0], clients=2, requests=2, output=16), seed=0)
        for turn in range(options.rounds):
            for load in loads:
                for server in servers[turn % len(servers) :] + servers[: turn % len(servers)]:
                    found = measure(server, load, seed=1 + turn)
                    runs.setdefault(load.name, {}).setdefault(server.name, []).append(found)
                    print(f"round {turn + 1}, {load.name}, {server.name}: {line(found)}", flush=True)
    medians = {load: {name: median(each) for name, each in by_server.items()} for load, by_server in runs.items()}
    print_tables(medians)
    if options.json:
        facts = {"date": time.strftime("%Y-%m-%d"), "cpu": cpu_name(), "cores": len(os.sched_getaffinity(0))}
        document = {**facts, "loads": [asdict(load) for load in loads], "runs": runs, "medians": medians}
        options.json.write_text(json.dumps(document, indent=1))
    return 0


def chosen(options: argparse.Namespace, folder: Path) -> Iterator[contextlib.AbstractContextManager[Server]]:
    """Every server that was asked for, not started yet."""
    for name, command, settings in commands(options, folder):
        if options.only is None or name in options.only:
            log = folder / f"{name.replace(' ', '-')}.log"
            yield started(name, settings.pop("model"), command, log=log, **settings)


def commands(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """(name, command, what ``started`` wants to know) of each."""
    for name, flags in HEADRACE.items():
        command = [sys.executable, "-m", "headrace", "serve", "--launcher", "local", "--port", "{port}"]
        yield name, [*command, "--served-model-name", "m", *flags], {"model": "m", "roles": HEADRACE_ROLES}
    if options.vllm and (options.only is None or "vLLM bf16" in options.only):
        command = [str(options.vllm / "bin" / "vllm"), "serve", str(bfloat16_directory(folder)), "--port", "{port}"]
        command += [
            "--served-model-name",
            "m",
            "--dtype",
            "bfloat16",
            "--max-model-len",
            "2048",
            "--max-num-seqs",
            "64",
        ]
        last = len(os.sched_getaffinity(0)) - 1
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{last}", "HF_HUB_OFFLINE": "1"}
        yield "vLLM bf16", command, {"model": "m", "environment": environment, "seconds": 900}
    if options.llama_server:
        models = {"4-bit": default_model(), **dict(each.split("=", 1) for each in options.llama_model)}
        for kind, file in models.items():
            command = [str(options.llama_server), "-m", file, "--port", "{port}", "--alias", "m", "-np", "64"]
            command += ["-c", str(64 * 1024), "-t", str(len(os.sched_getaffinity(0)))]
            yield f"llama.cpp {kind}", command, {"model": "m"}


def bfloat16_directory(folder: Path) -> Path:
    """The default model as a Hugging Face directory in bfloat16, for those who read no GGUF files."""
    import torch
    from safetensors.torch import save_file

    from headrace.model_files.gguf_metadata import read_metadata
    from workers.model.config import ModelConfig
    from workers.model.gguf_checkpoint import GgufCheckpoint

    artefacts = load_artefacts(default_model())
    checkpoint = GgufCheckpoint(read_metadata(artefacts.weights), ModelConfig.from_dict(artefacts.config))
    made = folder / "bfloat16"
    made.mkdir()
    tensors = {name: checkpoint.decoded(name, torch.bfloat16) for name in checkpoint.shapes()}
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    for file in artefacts.directory.iterdir():
        if file.is_file():
            (made / file.name).write_bytes(file.read_bytes())
    (made / "config.json").write_text(json.dumps({**artefacts.config, "dtype": "bfloat16"}))
    return made


def measure(server: Server, load: Load, *, seed: int) -> dict[str, Any]:
    """One run, with the CPU that the server's processes used: shares of a core by role."""
    before = server.usage().cpu
    found: Measured = run(server.host, server.port, server.model, load, seed)
    after = server.usage().cpu
    shares = {role: (after[role] - before.get(role, 0.0)) / found.wall for role in after}
    return {**asdict(found), "server_cpu": shares}


def scaled(load: Load, scale: float) -> Load:
    return replace(load, requests=max(load.clients, round(load.requests * scale)))


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {
        key: statistics.median(each[key] for each in runs) for key in runs[0] if key != "server_cpu"
    }
    roles = {role for each in runs for role in each["server_cpu"]}
    found["server_cpu"] = {role: statistics.median(each["server_cpu"].get(role, 0) for each in runs) for role in roles}
    return found


def line(found: dict[str, Any]) -> str:
    return (
        f"{found['output_per_second']:.0f} tok/s out, {found['input_per_second']:.0f} in, "
        f"TTFT {found['ttft_p50']:.0f} ms, TPOT {found['tpot_p50']:.1f} ms, failed {found['failed']}"
    )


def print_tables(medians: dict[str, dict[str, dict[str, Any]]]) -> None:
    print(f"\n{time.strftime('%Y-%m-%d')}, {cpu_name()}, {len(os.sched_getaffinity(0))} CPUs, {platform.machine()}\n")
    print(
        "| load | server | tok/s out | tok/s in | TTFT p50 | TPOT p50 | cores | per core | client CPU | frontend CPU |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for load, by_server in medians.items():
        for name, found in by_server.items():
            shown = found["server_cpu"].get("frontend")
            frontend = f"{shown:.0%}" if shown is not None else ""
            cores = sum(found["server_cpu"].values())
            per_core = found[rate_of(load)] / max(cores, 0.01)
            print(
                f"| {load} | {name} | {found['output_per_second']:.0f} | {found['input_per_second']:.0f} | "
                f"{found['ttft_p50']:.0f} ms | {found['tpot_p50']:.1f} ms | {cores:.2f} | {per_core:.0f} | "
                f"{found['client_cpu']:.0%} | {frontend} |"
            )
    print_ratios(medians)


def print_ratios(medians: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Of headrace's best to the best peer, and of bfloat16 to bfloat16."""
    if not any(not name.startswith("headrace") for by_server in medians.values() for name in by_server):
        return
    print("\n| load | best to best | bf16 to bf16 |\n|---|---|---|")
    for load, by_server in medians.items():
        rate = rate_of(load)

        def best(ours: bool, only: str, servers: dict[str, Any] = by_server, rate: str = rate) -> float:
            rates = [
                found[rate] for name, found in servers.items() if name.startswith("headrace") is ours and only in name
            ]
            return max(rates, default=0.0)

        cells = [f"{best(True, only) / best(False, only):.2f}" if best(False, only) else "" for only in ("", "bf16")]
        print(f"| {load} | {cells[0]} | {cells[1]} |")


def rate_of(load: str) -> str:
    """What a load is about: what goes in, or what comes out."""
    return "input_per_second" if load == "prefill" else "output_per_second"


def cpu_name() -> str:
    """Its name, and whether it has AMX."""
    text = Path("/proc/cpuinfo").read_text()
    name = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "?")
    return f"{name}, {'with' if 'amx_bf16' in text else 'without'} AMX"


if __name__ == "__main__":
    sys.exit(main())
