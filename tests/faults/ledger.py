"""What each client saw, and how that compares with what it would have seen without the fault."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import httpx

PATIENCE = 180.0
"""Seconds without a byte after which a stream counts as lost."""


@dataclass(frozen=True)
class Ask:
    """One streamed request."""

    name: str
    path: str
    body: dict[str, Any]


class Verdict(Enum):
    """What became of a stream."""

    EXACT = "continued exactly"
    FAILED_CLEANLY = "failed cleanly"
    """One well-formed error, or the connection of a frontend that died."""
    LOST = "lost"
    """Anything else: wrong tokens, a second end, an end without a terminal event, silence."""


@dataclass
class Ledger:
    """One stream as its client saw it."""

    ask: Ask
    frontend: str = ""
    status: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Seconds on this process's clock, one an event."""
    done: int = 0
    """How often ``[DONE]`` came."""
    after_done: int = 0
    """Events after it."""
    broken: str = ""
    """How the connection ended, when it did not end well."""
    error: dict[str, Any] | None = None

    @property
    def tokens(self) -> int:
        """Output tokens seen, over all choices."""
        return sum(len(choice.get("token_ids") or ()) for event in self.events for choice in event.get("choices", ()))

    @property
    def longest_gap(self) -> float:
        """Seconds between two events, at the most."""
        return max((later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)), default=0.0)

    def folded(self) -> dict[str, Any]:
        """The answer: per choice its text, ids, logprobs and end, and the usage; without what may differ."""
        choices: dict[int, dict[str, Any]] = {}
        usage: dict[str, Any] | None = None
        for event in self.events:
            for part in event.get("choices", ()):
                choice = choices.setdefault(part["index"], {"text": "", "ids": [], "logprobs": [], "ends": []})
                choice["text"] += part.get("text") or (part.get("delta") or {}).get("content") or ""
                choice["ids"] += part.get("token_ids") or []
                choice["logprobs"] += (part.get("logprobs") or {}).get("content") or []
                if part.get("finish_reason"):
                    choice["ends"].append((part["finish_reason"], part.get("stop_reason")))
            if event.get("usage"):
                usage = {key: value for key, value in event["usage"].items() if key != "prompt_tokens_details"}
        return {"choices": choices, "usage": usage}

    def verdict(self, undisturbed: Ledger, dead_frontends: Sequence[str]) -> Verdict:
        """Compared with the same ask in a run without faults."""
        if self.error is not None:
            clean = set(self.error) >= {"message", "type", "param", "code"} and not self.after_done
            return Verdict.FAILED_CLEANLY if clean else Verdict.LOST
        if self.broken:
            dead = self.frontend in dead_frontends or not self.frontend
            return Verdict.FAILED_CLEANLY if dead and not self.done else Verdict.LOST
        whole = self.status == 200 and self.done == 1 and not self.after_done
        folded = self.folded()
        if not whole or any(len(choice["ends"]) != 1 for choice in folded["choices"].values()):
            return Verdict.LOST
        return Verdict.EXACT if folded == undisturbed.folded() else Verdict.LOST

    def save(self, directory: Path, undisturbed: Ledger) -> Path:
        """Both runs, for whoever has to find the fault."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.ask.name}.json"
        record = {
            "ask": self.ask.body,
            "frontend": self.frontend,
            "status": self.status,
            "broken": self.broken,
            "error": self.error,
            "done": self.done,
            "seen": self.folded(),
            "undisturbed": undisturbed.folded(),
            "events": self.events,
        }
        path.write_text(json.dumps(record, indent=1))
        return path


async def follow(client: httpx.AsyncClient, ledger: Ledger) -> None:
    """Ask and record until the stream is over, one way or the other."""
    try:
        async with client.stream("POST", ledger.ask.path, json=ledger.ask.body) as response:
            ledger.frontend, ledger.status = response.headers.get("x-headrace-frontend", ""), response.status_code
            if response.status_code != 200:
                ledger.error = json.loads(await response.aread())["error"]
                return
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    _record(ledger, line.removeprefix("data: "))
    except (httpx.HTTPError, json.JSONDecodeError, KeyError) as error:
        ledger.broken = f"{type(error).__name__}: {error}"


def _record(ledger: Ledger, data: str) -> None:
    if ledger.done:
        ledger.after_done += 1
    elif data == "[DONE]":
        ledger.done += 1
    else:
        event = json.loads(data)
        ledger.times.append(time.monotonic())
        if "error" in event:
            ledger.error = event["error"]
        else:
            ledger.events.append(event)


async def follow_all(url: str, ledgers: Sequence[Ledger]) -> None:
    """All at once, each on a connection of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=httpx.Timeout(PATIENCE)) as client:
        await asyncio.gather(*(follow(client, ledger) for ledger in ledgers))
