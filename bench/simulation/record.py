"""Write a step log of the real engine: ``python -m bench.simulation.record --out FILE [--model MODEL] [serve flags]``.

Starts a server with one local group, sends it prompts of many lengths by few and by many clients, and stops it. A
minute or two on a CPU; run it on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

ROUNDS = (1, 1, 2, 4, 8, 16)
"""Clients at once, round by round."""
WORD = "river "


async def load(base: str, rounds: tuple[int, ...]) -> None:
    """Ask for something, round by round."""
    rng = random.Random(0)
    async with httpx.AsyncClient(base_url=base, timeout=600.0) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        for clients in rounds:
            bodies = [
                {
                    "model": model,
                    "prompt": f"{rng.random()} " + WORD * rng.choice([8, 40, 150, 400, 900]),
                    "max_tokens": rng.choice([8, 24, 48]),
                    "ignore_eos": True,
                    "temperature": 0,
                }
                for _ in range(clients)
            ]
            await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def main() -> None:
    """Serve, ask, stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="the installed default unless given")
    parser.add_argument("--out", type=Path, required=True, help="file for the step log")
    given, flags = parser.parse_known_args()
    port = free_port()
    command = [sys.executable, "-m", "headrace", "serve", *([given.model] if given.model else [])]
    command += ["--port", str(port), "--launcher", "local", "--step-log", str(given.out), *flags]
    with subprocess.Popen(command) as server:
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", server)
            asyncio.run(load(f"http://127.0.0.1:{port}", ROUNDS))
        finally:
            server.send_signal(signal.SIGTERM)


def wait_until_ready(base: str, server: subprocess.Popen[bytes]) -> None:
    """Raises RuntimeError when the server ends instead."""
    while server.poll() is None:
        try:
            models = httpx.get(f"{base}/v1/models", timeout=5.0).json()
        except httpx.TransportError:
            time.sleep(0.2)
            continue
        if models["data"][0]["status"] == "ready":
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server ended with status {server.returncode}")


if __name__ == "__main__":
    main()
