"""Goes through what programs do with LangChain, and prints what came of it as one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

URL = f"{sys.argv[1]}/v1"
MODEL = "scripted-1"


def chat(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=URL, api_key="none", max_retries=0, **options)


def whole() -> Any:
    message = chat().invoke("unicode")
    return {"text": message.content, "usage": message.usage_metadata, "about": message.response_metadata}


def streamed() -> Any:
    full: Any = None
    deltas = []
    for chunk in chat(stream_usage=True).stream("unicode"):
        deltas.append(chunk.content)
        full = chunk if full is None else full + chunk
    return {
        "deltas": deltas,
        "text": full.content,
        "usage": full.usage_metadata,
        "finish": full.response_metadata["finish_reason"],
    }


def conversation() -> Any:
    turns = [SystemMessage("Be brief."), HumanMessage("hello"), AIMessage("Hi."), HumanMessage("plain")]
    return chat(temperature=0, seed=7, max_tokens=12, stop=["zebra"]).invoke(turns).content


def chain() -> Any:
    made = ChatPromptTemplate.from_messages([("system", "{tone}"), ("human", "{word}")]) | chat() | StrOutputParser()
    return made.batch([{"tone": "short", "word": word} for word in ("plain", "unicode", "plain")])


def logprobs() -> Any:
    found = chat(logprobs=True, top_logprobs=2).invoke("plain").response_metadata["logprobs"]["content"]
    return bytes(byte for entry in found for byte in entry["bytes"]).decode()


def two() -> Any:
    result = chat(n=2).generate([[HumanMessage("plain")]])
    return [generation.text for generation in result.generations[0]]


def completion() -> Any:
    model = OpenAI(model=MODEL, base_url=URL, api_key="none", max_tokens=400, max_retries=0)
    return {"whole": model.invoke("unicode"), "streamed": "".join(model.stream("unicode"))}


def asynchronous() -> Any:
    async def all_of() -> list[str]:
        async def one(word: str) -> str:
            return "".join([str(chunk.content) async for chunk in chat().astream(word)])

        return await asyncio.gather(*(one(word) for word in ("plain", "unicode") * 4))

    return asyncio.run(all_of())


def error() -> Any:
    try:
        chat(temperature=2).bind(temperature=9).invoke("plain")
    except openai.BadRequestError as raised:
        return {"code": raised.code, "param": raised.param}
    return None


def fault_in_a_stream() -> Any:
    text = ""
    try:
        for chunk in chat().stream("faulty later"):
            text += str(chunk.content)
    except openai.APIError as raised:
        return {"text": text, "code": raised.code}
    return None


SCENARIOS = (
    whole,
    streamed,
    conversation,
    chain,
    logprobs,
    two,
    completion,
    asynchronous,
    error,
    fault_in_a_stream,
)


def outcome(scenario: Callable[[], Any]) -> Any:
    try:
        return scenario()
    except Exception:  # noqa: BLE001 - whatever it is belongs into the report
        return {"unexpected": traceback.format_exc()}


sys.stdout.write(json.dumps({scenario.__name__: outcome(scenario) for scenario in SCENARIOS}))
