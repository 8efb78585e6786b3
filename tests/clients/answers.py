"""What the scripted server of these tests answers, and the words in a prompt that choose it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openai.types.chat import ChatCompletionUserMessageParam

MODEL = "scripted-1"
ALIAS = "another-name"

UNICODE = "unicode"
UNICODE_TEXT = (
    "Grüße, 世界! 👩‍👩‍👧‍👦 🇫🇷 👍🏽 e\u0301 नमस्ते ﷽ שלום\t\"quoted\"\\\n\n```py\nx = '</s>'\n``` \U0001f9d1‍\U0001f680."
)
"""Two- to four-byte characters, ZWJ families, a flag, a skin tone, combining marks, both directions, JSON escapes."""

PLAIN = "plain"
PLAIN_TEXT = "The capital of France is Paris."

SLOW = "slow"
SLOW_TEXT = "0123456789" * 5
"""One token a step, a step lasts STEP_SECONDS."""
STEP_SECONDS = 0.2

FAULTY_AT_ONCE = "faulty at once"
FAULTY_LATER = "faulty later"
FAULTY_PREFIX = "0123"
"""What is said before the later fault."""

STEP_SIZES = [3, 1, 8, 2, 5]
"""Characters are cut in every way."""


def write_script(path: Path) -> Path:
    """The engine script."""
    lines: list[dict[str, Any]] = [
        {"match": {"prompt_contains": UNICODE}, "text": UNICODE_TEXT, "step_sizes": STEP_SIZES},
        {"match": {"prompt_contains": PLAIN}, "text": PLAIN_TEXT, "step_sizes": [4, 1]},
        {"match": {"prompt_contains": SLOW}, "text": SLOW_TEXT, "delay_ms": 1000 * STEP_SECONDS},
        {
            "match": {"prompt_contains": FAULTY_AT_ONCE},
            "text": "0123456789",
            "fault": {"at_index": 0, "kind": "nan"},
        },
        {
            "match": {"prompt_contains": FAULTY_LATER},
            "text": "0123456789",
            "step_sizes": [2],
            "fault": {"at_index": len(FAULTY_PREFIX), "kind": "nan"},
        },
        {"text": UNICODE_TEXT, "step_sizes": STEP_SIZES},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def tokens(text: str) -> int:
    """What a text costs with the byte tokenizer."""
    return len(text.encode())


def ask(content: str) -> list[ChatCompletionUserMessageParam]:
    """One user turn."""
    return [{"role": "user", "content": content}]


def prompt_tokens(content: str) -> int:
    """What one user turn costs once rendered."""
    control = 3
    return control + tokens("user\n") + tokens(content) + tokens("\nassistant\n") + tokens("\n") - 1


def answer_tokens(text: str) -> int:
    """What an answer costs that ends by itself: its end token counts."""
    return tokens(text) + 1
