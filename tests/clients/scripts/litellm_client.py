"""Goes through what programs do with LiteLLM, and prints what came of it as one JSON object."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

import litellm

URL = f"{sys.argv[1]}/v1"
COMMON: dict[str, Any] = {"model": "openai/scripted-1", "api_base": URL, "api_key": "none", "num_retries": 0}
litellm.suppress_debug_info = True


def ask(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def whole() -> Any:
    return litellm.completion(messages=ask("unicode"), **COMMON).model_dump()


def as_hosted_vllm() -> Any:
    asked = {**COMMON, "model": "hosted_vllm/scripted-1"}
    text = ""
    for chunk in litellm.completion(messages=ask("unicode"), stream=True, **asked):
        text += chunk.choices[0].delta.content or ""
    return {"whole": litellm.completion(messages=ask("unicode"), **asked).choices[0].message.content, "streamed": text}


def streamed() -> Any:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(messages=ask("unicode"), **options, **COMMON))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=ask("unicode"))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    return {"text": text, "finishes": finishes, "rebuilt": rebuilt.model_dump()}


def parameters() -> Any:
    answer = litellm.completion(
        messages=ask("plain"), max_tokens=12, temperature=0, top_p=0.9, seed=7, stop=["zebra"], n=2, user="u", **COMMON
    )
    return [choice.model_dump() for choice in answer.choices]


def logprobs() -> Any:
    answer = litellm.completion(messages=ask("plain"), logprobs=True, top_logprobs=2, **COMMON)
    found = answer.choices[0].logprobs.model_dump()["content"]
    return bytes(byte for entry in found for byte in entry["bytes"]).decode()


def completion() -> Any:
    asked = {**COMMON, "model": "text-completion-openai/scripted-1"}
    answer = litellm.text_completion(prompt="unicode", max_tokens=400, **asked)
    text = ""
    for chunk in litellm.text_completion(prompt="unicode", max_tokens=400, stream=True, **asked):
        text += chunk.choices[0].text or ""
    return {"whole": answer.choices[0].text, "streamed": text}


def asynchronous() -> Any:
    async def one(word: str) -> str:
        text = ""
        async for chunk in await litellm.acompletion(messages=ask(word), stream=True, **COMMON):
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_of() -> list[str]:
        return await asyncio.gather(*(one(word) for word in ("plain", "unicode") * 4))

    return asyncio.run(all_of())


def errors() -> Any:
    found = {}
    cases: dict[str, dict[str, Any]] = {
        "bad_value": {"temperature": 9, "messages": ask("plain")},
        "too_long": {"messages": ask("x" * 100_000)},
        "no_model": {"model": "openai/nobody", "messages": ask("plain")},
        "engine": {"messages": ask("faulty at once")},
    }
    for name, fields in cases.items():
        try:
            litellm.completion(**{**COMMON, **fields})
        except litellm.exceptions.APIError as raised:
            found[name] = {"kind": type(raised).__name__, "status": raised.status_code}
        except Exception as raised:  # noqa: BLE001 - its classes have the client's for parents
            found[name] = {"kind": type(raised).__name__, "status": getattr(raised, "status_code", None)}
    return found


def fault_in_a_stream() -> Any:
    text = ""
    try:
        for chunk in litellm.completion(messages=ask("faulty later"), stream=True, **COMMON):
            text += chunk.choices[0].delta.content or ""
    except Exception as raised:  # noqa: BLE001 - which one it is, is the question
        return {"text": text, "kind": type(raised).__name__}
    return {"text": text, "kind": None}


SCENARIOS = (
    whole,
    as_hosted_vllm,
    streamed,
    parameters,
    logprobs,
    completion,
    asynchronous,
    errors,
    fault_in_a_stream,
)


def outcome(scenario: Callable[[], Any]) -> Any:
    try:
        return scenario()
    except Exception:  # noqa: BLE001 - whatever it is belongs into the report
        return {"unexpected": traceback.format_exc()}


sys.stdout.write(json.dumps({scenario.__name__: outcome(scenario) for scenario in SCENARIOS}, default=str))
