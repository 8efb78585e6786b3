"""Which request bodies the fake server takes: the contract's fields in one table."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from typing import Any

VOCABULARY = 259
Test = Callable[[Any], bool]


class Refusal(Exception):
    """An error reply."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = "invalid_value") -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers: dict[str, str] = {}


def number(low: float, high: float = float("inf")) -> Test:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def whole(low: int, high: int = 2**63 - 1) -> Test:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def many(test: Test, most: int = 10_000) -> Test:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(test, value))


def text(longest: int = 10**7, shortest: int = 0) -> Test:
    return lambda value: isinstance(value, str) and shortest <= len(value.encode("utf-8", "replace")) <= longest


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def mapping(value: Any) -> bool:
    return isinstance(value, dict)


token_id = whole(0, VOCABULARY - 1)
stop_string = text(256, 1)


def biases(value: Any) -> bool:
    return isinstance(value, dict) and all(
        k.isdigit() and token_id(int(k)) and number(-100, 100)(v) for k, v in value.items()
    )


COMMON: dict[str, Test] = {
    "model": text(),
    "max_tokens": whole(-1),
    "min_tokens": whole(0),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": whole(-1),
    "min_p": number(0, 1),
    "repetition_penalty": number(1e-9),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "seed": whole(-(2**63)),
    "n": whole(1, 128),
    "stop": lambda value: stop_string(value) or many(stop_string, 64)(value),
    "stop_token_ids": many(token_id),
    "ignore_eos": flag,
    "include_stop_str_in_output": flag,
    "return_token_ids": flag,
    "logit_bias": biases,
    "allowed_token_ids": many(token_id),
    "priority": whole(-100, 100),
    "timeout": number(0),
    "request_id": lambda value: text(256)(value) and value.isprintable(),
    "stream": flag,
    "stream_options": mapping,
    "user": text(),
    "metadata": mapping,
    "store": flag,
    "service_tier": text(),
    "safety_identifier": text(),
    "prompt_cache_key": text(),
    "prediction": mapping,
    "verbosity": text(),
}
CHAT = {
    **COMMON,
    "messages": lambda value: isinstance(value, list),
    "max_completion_tokens": lambda value: whole(-1)(value) and value != 0,
    "logprobs": flag,
    "top_logprobs": whole(0, 20),
    "add_generation_prompt": flag,
    "continue_final_message": flag,
    "chat_template_kwargs": mapping,
}
COMPLETIONS = {**COMMON, "prompt": lambda value: True, "logprobs": whole(0, 20), "echo": flag}
RENDER = {name: CHAT[name] for name in ("model", "messages", "add_generation_prompt", "continue_final_message")}
TOKENIZE = {**RENDER, "prompt": text(), "add_special_tokens": flag}
DETOKENIZE = {"model": text(), "tokens": many(token_id)}

SYNONYMS = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "no_stop_trim": "include_stop_str_in_output",
}

REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "best_of": (1,),
    "use_beam_search": (False,),
    "suffix": ("",),
    "tools": (),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "functions": (),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "thinking_token_budget": (),
    "thinking_budget_tokens": (),
    "skip_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "add_special_tokens": (),
    "bad_words": (),
    "prompt_logprobs": (),
    "cache_salt": (),
    "truncate_prompt_tokens": (),
    "documents": (),
}


def read(body: bytes, table: dict[str, Test], quirks: frozenset[str]) -> tuple[dict[str, Any], list[str]]:
    """The fields that were given, and the names that were ignored. Raises Refusal."""
    try:
        if "takes NaN" in quirks:
            raw = json.loads(body, parse_constant=lambda name: 1.0)
        else:
            raw = json.loads(body.decode("utf-8"), parse_constant=lambda name: json.loads("!"))
    except (ValueError, RecursionError):
        raise Refusal(500 if "500 for bad JSON" in quirks else 400, "not JSON", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise Refusal(400, "the body is not an object", code="invalid_type")
    fields: dict[str, Any] = {}
    ignored = []
    for given, value in raw.items():
        name = SYNONYMS.get(given, given)
        if name in table:
            _take(fields, name, given, value, table[name], quirks)
        elif name in REFUSED:
            if value not in (None, [], {}) and not any(
                value == other and type(value) is type(other) for other in REFUSED[name]
            ):
                raise Refusal(400, f"'{name}' is not supported", name, "unsupported_parameter")
        else:
            ignored.append(_unknown(given, table, quirks))
    return fields, ignored


def _take(fields: dict[str, Any], name: str, given: str, value: Any, test: Test, quirks: frozenset[str]) -> None:
    if (value is None and name != "model") or (value in ([], {}) and name not in ("messages", "prompt", "tokens")):
        return
    if not test(value) and f"any {name}" not in quirks:
        bounds = "it is 0 to 2 or 0 to 1" if name in ("temperature", "top_p") else "it has a bound"
        raise Refusal(400, f"'{name}' cannot be {str(value)[:40]!r}; {bounds}", name)
    if name in fields and fields[name] != value:
        raise Refusal(400, f"'{given}' and '{name}' differ", given)
    fields[name] = value


def _unknown(name: str, table: dict[str, Test], quirks: frozenset[str]) -> str:
    if name == "extra_body":
        raise Refusal(400, "merge extra_body into the top level", name, "unknown_parameter")
    if "no typo check" not in quirks:
        for close in difflib.get_close_matches(name.lower().replace("-", "_"), table, 1, 0.9):
            raise Refusal(400, f"unknown '{name}': did you mean '{close}'?", name, "unknown_parameter")
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "?" for c in name)[:64]
