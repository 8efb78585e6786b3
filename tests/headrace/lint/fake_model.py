"""What the fake server answers: bytes are its tokens, and an answer is a pure function of its request."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from typing import Any

CONTEXT = 4096
END = 256
BEGIN, STOP = "<|im_start|>", "<|im_end|>"
SPECIAL = {"<|endoftext|>": 258, BEGIN: 257, STOP: 256}


def encode(text: str, *, special: bool = True) -> list[int]:
    """Bytes; special tokens' text is their id."""
    for marker, token in SPECIAL.items() if special else ():
        if marker in text:
            head, _, tail = text.partition(marker)
            return [*encode(head), token, *encode(tail)]
    return list(text.encode("utf-8", "replace"))


def decode(ids: list[int]) -> str:
    """Text without special tokens."""
    return bytes(token for token in ids if token < 256).decode("utf-8", "replace")


def chat_ids(
    messages: list[dict[str, Any]], *, prompt: bool = True, resume: bool = False, literal: bool = False
) -> list[int]:
    """ChatML; what users write is text."""
    ids: list[int] = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        special = literal or message["role"] not in ("user", "tool")
        ids += [257, *encode(f"{message['role']}\n"), *encode(content, special=special), 256, 10]
    if resume:
        return ids[:-2]
    return ids + ([257, *encode("assistant\n")] if prompt else [])


@dataclass
class Choice:
    """One finished choice."""

    ids: list[int]
    """Counted tokens."""
    shown: list[int]
    """Those that are text."""
    text: str
    finish: str
    reason: str | int | None


def choice(prompt: list[int], fields: dict[str, Any], limit: int, index: int, quirks: frozenset[str]) -> Choice:
    """Generate: byte by byte until a stop, the end or the limit."""
    full = list(_said(prompt, fields, index, quirks).encode())
    low = fields.get("min_tokens") or 0
    stops = fields.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    ids: list[int] = []
    for at in range(limit):
        token = full[at] if at < len(full) else END
        token = 32 if token == END and at < low else token
        ids.append(token)
        if len(ids) < low:
            continue
        if (token == END and not fields.get("ignore_eos")) or token in (fields.get("stop_token_ids") or ()):
            return Choice(ids, ids[:-1], decode(ids[:-1]), "stop", None if token == END else token)
        found = [stop for stop in stops if stop in decode(ids)]
        if found and "ignores stop" not in quirks:
            where = decode(ids).index(found[0])
            keep = fields.get("include_stop_str_in_output") or "keeps stop" in quirks
            text = decode(ids)[: where + len(found[0]) if keep else where]
            return Choice(ids, ids[: len(text.encode())], text, "stop", found[0])
    return Choice(ids, ids, decode(ids), "stop" if "stop for length" in quirks else "length", None)


def _said(prompt: list[int], fields: dict[str, Any], index: int, quirks: frozenset[str]) -> str:
    words = ["One,", "🦦", "two,", "three", "otters", "客", "four,", "five,", "six,", "seven.", "Yes!"]
    temperature = fields.get("temperature", 1)
    narrow = fields.get("top_k") == 1 or fields.get("min_p") == 1 or fields.get("top_p", 1) < 0.01
    if temperature and not narrow:
        seed = fields.get("seed")
        key = (
            f"{seed}-{0 if 'same choices' in quirks else index}"
            if seed is not None and "ignores seed" not in quirks
            else None
        )
        random.Random(key).shuffle(words)
    elif "random" in quirks:
        random.shuffle(words)
    allowed = fields.get("allowed_token_ids")
    text = f"{zlib.crc32(bytes(t % 256 for t in prompt)) % 1000} {' '.join(words)}"
    banned = {int(token) for token, bias in (fields.get("logit_bias") or {}).items() if bias == -100}
    if allowed and "ignores masks" not in quirks:
        return decode([allowed[0]] * 200)
    if "ignores masks" in quirks:
        return text
    return bytes(95 if byte in banned else byte for byte in text.encode()).decode("utf-8", "replace")


def entry(token: int, top: int) -> dict[str, Any]:
    """One token's log-probabilities in the chat form."""
    alternatives = [{**_named((token + at) % 256), "logprob": -0.5 - at} for at in range(top)]
    return {**_named(token), "logprob": -0.5, "top_logprobs": alternatives}


def _named(token: int) -> dict[str, Any]:
    data = [token] if token < 256 else []
    return {"token": name(token), "bytes": data}


def name(token: int) -> str:
    """A token alone as text."""
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}" if token < 256 else ""


def arrays(ids: list[int], top: int, start: int = 0) -> dict[str, Any]:
    """The completions form; ``start`` characters came before."""
    offsets = [start + len(bytes(t for t in ids[:at] if t < 256).decode("utf-8", "ignore")) for at in range(len(ids))]
    return {
        "tokens": [name(token) for token in ids],
        "token_logprobs": [-0.5 for _ in ids],
        "top_logprobs": [{name((token + at) % 256): -0.5 - at for at in range(max(1, top))} for token in ids]
        if top
        else None,
        "text_offset": offsets,
    }
