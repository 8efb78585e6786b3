"""Judges of every exchange that any check made: framing, envelopes, order, usage, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.lint import shapes
from headrace.lint.exchange import Exchange
from headrace.lint.strict import StrictError, decode_json
from headrace.lint.verdicts import Check, Outcome, Verdict, Wrong

AREA = "every reply"
MAX_ERROR_BODY = 16 << 10
MAX_SHOWN = 2

Judge = Callable[[Exchange], str]


@dataclass(frozen=True)
class Everywhere:
    """One rule that holds for every exchange it concerns."""

    name: str
    section: str
    right: str
    concerns: Callable[[Exchange], bool]
    judge: Judge
    """What is wrong, or an empty string."""

    def outcome(self, exchanges: Sequence[Exchange]) -> Outcome:
        """The verdict over a whole run."""
        check = Check(AREA, self.name, self.section, self.right, lambda session: None)
        seen, bad = 0, []
        for exchange in exchanges:
            if not self.concerns(exchange):
                continue
            seen += 1
            try:
                problem = self.judge(exchange)
            except Wrong as wrong:
                problem = wrong.why
            if problem:
                bad.append((problem, exchange))
        if not seen:
            return Outcome(check, Verdict.NOT_OFFERED, "no reply that this concerns")
        if not bad:
            return Outcome(check, Verdict.RIGHT)
        distinct = dict(reversed(bad))
        others = f"; also: {'; '.join(list(distinct)[-2::-1][:3])}" if len(distinct) > 1 else ""
        why = f"{bad[0][0]} (in {len(bad)} of {seen} replies{others})"
        return Outcome(check, Verdict.WRONG, why, tuple(exchange for _, exchange in bad[:MAX_SHOWN]))


def judges() -> list[Everywhere]:
    """All rules that hold everywhere."""
    return [
        Everywhere("HTTP framing", "5", "A reply is well-formed HTTP/1.1.", _any, _framing),
        Everywhere("request id", "5", "x-request-id is on every response.", _any, _request_id),
        Everywhere("no server fault", "5", "Nothing a client sends gives a 5xx.", _any, _no_fault),
        Everywhere("error body", "5", "An error is JSON with message, type, param and code.", _is_error, _error_body),
        Everywhere("error size", "5", f"An error is at most {MAX_ERROR_BODY >> 10} KiB.", _is_error, _error_size),
        Everywhere("retry-after", "5", "429 and 503 say when to come again.", _is_busy, _retry_after),
        Everywhere("strict JSON", "3", "A JSON body is strict JSON in UTF-8.", _is_json, _strict_json),
        Everywhere("answer shape", "3", "A whole answer has all its keys.", _is_answer, _answer_shape),
        Everywhere("answer id", "2", "Ids of answers are the server's own.", _is_generation, _own_id),
        Everywhere("event framing", "3", "An event is one data line and a blank line.", _is_stream, _event_framing),
        Everywhere("stream end", "3", "A stream ends with [DONE], once.", _is_stream, _stream_end),
        Everywhere("stream headers", "3", "A stream is not cached or buffered.", _is_streamed, _stream_headers),
        Everywhere("chunk envelope", "3", "Chunks share id, created, model, fingerprint.", _is_stream, _chunk_envelope),
        Everywhere("chunk keys", "3", "Every choice of a chunk has delta and finish_reason.", _is_stream, _chunk_keys),
        Everywhere("role first", "3", "A chat choice begins with its role, in index order.", _is_chat_stream, _roles),
        Everywhere("deltas say something", "3", "Each later delta has something new.", _is_stream, _deltas),
        Everywhere("one finish", "3", "Each choice finishes once, and is silent after.", _is_stream, _finishes),
        Everywhere("usage chunk", "3", "Usage is in one last chunk, when asked for.", _is_stream, _usage_chunk),
        Everywhere("usage sums", "4", "Counts add up and details are there.", _has_usage, _usage_sums),
        Everywhere("token limit", "4", "No choice has more tokens than allowed.", _has_usage, _token_limit),
    ]


def unique_ids(exchanges: Sequence[Exchange]) -> Outcome:
    """No two answers share an id."""
    check = Check(AREA, "unique ids", "2", "No two answers have the same id.", lambda session: None)
    owners: dict[str, Exchange] = {}
    for exchange in exchanges:
        if not _is_generation(exchange):
            continue
        identity = _bodies(exchange)[0].get("id")
        if isinstance(identity, str):
            if identity in owners:
                why = f"two answers have the id {identity!r}"
                return Outcome(check, Verdict.WRONG, why, (owners[identity], exchange))
            owners[identity] = exchange
    return Outcome(check, Verdict.RIGHT if owners else Verdict.NOT_OFFERED, "" if owners else "no answer with an id")


def _any(exchange: Exchange) -> bool:
    return True


def _is_error(exchange: Exchange) -> bool:
    return exchange.status >= 400 and exchange.method != "HEAD"


def _is_busy(exchange: Exchange) -> bool:
    return exchange.status in (429, 503)


def _is_json(exchange: Exchange) -> bool:
    return bool(exchange.reply.body) and "json" in exchange.reply.header("content-type") and not exchange.cut


def _is_streamed(exchange: Exchange) -> bool:
    return exchange.streamed and (exchange.chat or exchange.completion)


def _is_stream(exchange: Exchange) -> bool:
    return _is_streamed(exchange) and not exchange.cut


def _is_chat_stream(exchange: Exchange) -> bool:
    return _is_stream(exchange) and exchange.chat


def _is_answer(exchange: Exchange) -> bool:
    return exchange.status == 200 and (exchange.chat or exchange.completion) and not exchange.streamed


def _is_generation(exchange: Exchange) -> bool:
    return (_is_answer(exchange) or _is_stream(exchange)) and bool(_bodies(exchange))


def _has_usage(exchange: Exchange) -> bool:
    return _is_generation(exchange) and any(body.get("usage") is not None for body in _bodies(exchange))


def _bodies(exchange: Exchange) -> list[dict[str, Any]]:
    """The whole answer, or the chunks of a stream."""
    if exchange.streamed:
        return exchange.events.chunks
    try:
        return [exchange.json]
    except Wrong:
        return []


def _framing(exchange: Exchange) -> str:
    return "; ".join(exchange.reply.faults)


def _request_id(exchange: Exchange) -> str:
    given = exchange.reply.all("x-request-id")
    if len(given) == 1 and shapes.is_printable_id(given[0]):
        return ""
    return "no x-request-id" if not given else f"x-request-id is {given!r}"


def _no_fault(exchange: Exchange) -> str:
    # 501 says that something is not offered, 503 that it is later: neither is a fault.
    timed_out = exchange.status == 504 and "timeout" in (exchange.fields or {})
    fault = exchange.status >= 500 and exchange.status not in (501, 503) and not timed_out
    return f"answered {exchange.status}" if fault else ""


def _error_body(exchange: Exchange) -> str:
    kind = exchange.reply.header("content-type").partition(";")[0].strip()
    if kind != "application/json":
        return f"an error of content type {kind!r}"
    if "error" not in exchange.json:
        return "an error body without the key error"
    return shapes.first(shapes.error_problems(exchange.json["error"], exchange.status))


def _error_size(exchange: Exchange) -> str:
    size = len(exchange.reply.body)
    return f"an error body of {size} bytes" if size > MAX_ERROR_BODY else ""


def _retry_after(exchange: Exchange) -> str:
    value = exchange.reply.header("retry-after")
    return "" if value.isdigit() and int(value) <= 60 else f"Retry-After is {value!r}, not whole seconds up to 60"


def _strict_json(exchange: Exchange) -> str:
    try:
        decode_json(exchange.reply.body)
    except StrictError as error:
        return str(error)
    return ""


def _answer_shape(exchange: Exchange) -> str:
    if exchange.reply.header("content-type").partition(";")[0].strip() != "application/json":
        return f"an answer of content type {exchange.reply.header('content-type')!r}"
    return shapes.first(_answer_problems(exchange))


def _answer_problems(exchange: Exchange) -> Iterator[str]:
    body = exchange.json
    kind, prefix = ("chat.completion", "chatcmpl-") if exchange.chat else ("text_completion", "cmpl-")
    yield from shapes.envelope_problems(body, kind, prefix)
    for choice in body["choices"]:
        yield from shapes.chat_choice_problems(choice) if exchange.chat else shapes.text_choice_problems(choice)
    if "usage" not in body:
        yield "an answer without usage"


def _own_id(exchange: Exchange) -> str:
    identity = _bodies(exchange)[0].get("id")
    fields = exchange.fields or {}
    given = [value for name, value in exchange.headers.items() if name.lower() == "x-request-id"]
    mine = [value for value in (*given, fields.get("request_id")) if isinstance(value, str) and len(value) > 3]
    return f"the id {identity!r} is made of the client's" if any(value in str(identity) for value in mine) else ""


def _event_framing(exchange: Exchange) -> str:
    return exchange.events.faults[0] if exchange.events.faults else ""


def _stream_end(exchange: Exchange) -> str:
    done = exchange.events.done
    if done == 1 and exchange.reply.body.rstrip().endswith(b"data: [DONE]"):
        return ""
    return f"{done} [DONE] in a stream" if done != 1 else "[DONE] is not the last event"


def _stream_headers(exchange: Exchange) -> str:
    header = exchange.reply.header
    kind = header("content-type").lower().replace(" ", "")
    if kind != "text/event-stream;charset=utf-8":
        return f"Content-Type is {header('content-type')!r}"
    if "no-cache" not in header("cache-control") or "no-transform" not in header("cache-control"):
        return f"Cache-Control is {header('cache-control')!r}, not no-cache, no-transform"
    if header("x-accel-buffering").lower() != "no":
        return f"X-Accel-Buffering is {header('x-accel-buffering')!r}"
    return ""


def _chunk_envelope(exchange: Exchange) -> str:
    kind, prefix = ("chat.completion.chunk", "chatcmpl-") if exchange.chat else ("text_completion", "cmpl-")
    chunks = exchange.events.chunks
    for chunk in chunks:
        if problem := shapes.first(shapes.envelope_problems(chunk, kind, prefix)):
            return problem
        for name in ("id", "created", "model", "system_fingerprint"):
            if chunk.get(name) != chunks[0].get(name):
                return f"{name} changes from {chunks[0].get(name)!r} to {chunk.get(name)!r}"
    return "" if chunks or exchange.events.error else "a stream without chunks"


def _choices(exchange: Exchange) -> Iterator[dict[str, Any]]:
    for chunk in exchange.events.chunks:
        for choice in chunk.get("choices") or []:
            if isinstance(choice, dict):
                yield choice


def _chunk_keys(exchange: Exchange) -> str:
    for choice in _choices(exchange):
        if "finish_reason" not in choice:
            return "a chunk's choice without the key finish_reason"
        said = choice.get("delta") if exchange.chat else choice
        if not isinstance(said, dict) or (not exchange.chat and not isinstance(choice.get("text"), str)):
            return f"a chunk's choice without {'delta' if exchange.chat else 'text'}"
        if problem := shapes.first(shapes.said_problems(said, "delta")):
            return problem
        allowed = shapes.CHAT_FINISH if exchange.chat else shapes.TEXT_FINISH
        if choice["finish_reason"] is not None and choice["finish_reason"] not in allowed:
            return f"finish_reason is {choice['finish_reason']!r}"
    return ""


def _roles(exchange: Exchange) -> str:
    begun: list[object] = []
    for choice in _choices(exchange):
        index, delta = choice.get("index"), choice.get("delta") or {}
        if index not in begun:
            begun.append(index)
            if delta.get("role") != "assistant" or delta.get("content") != "" or choice.get("finish_reason"):
                return f"choice {index} begins with {delta!r}, not with role assistant and content ''"
        elif "role" in delta:
            return f"the role of choice {index} comes again"
    return "" if begun == sorted(begun, key=str) or begun == list(range(len(begun))) else f"choices begin as {begun}"


def _deltas(exchange: Exchange) -> str:
    seen: set[object] = set()
    for choice in _choices(exchange):
        index = choice.get("index")
        said = (choice.get("delta") or {}) if exchange.chat else choice
        words = [said.get(name) for name in ("content", "text", "reasoning", "reasoning_content", "tool_calls")]
        fresh = index not in seen and exchange.chat
        seen.add(index)
        extra = choice.get("logprobs") or choice.get("token_ids")
        if not fresh and not any(words) and choice.get("finish_reason") is None and not extra:
            return f"a delta that says nothing: {choice!r}"[:200]
    return ""


def _finishes(exchange: Exchange) -> str:
    finished: dict[object, object] = {}
    seen: set[object] = set()
    for choice in _choices(exchange):
        index = choice.get("index")
        seen.add(index)
        if index in finished:
            return f"choice {index} goes on after its finish_reason {finished[index]!r}"
        if choice.get("finish_reason") is not None:
            finished[index] = choice["finish_reason"]
    if exchange.events.error is not None:
        return ""
    if unfinished := sorted(map(str, seen - finished.keys())):
        return f"no finish_reason for choice {', '.join(unfinished)}"
    wanted = _wanted(exchange)
    if wanted is not None and seen != set(range(wanted)):
        return f"choices {sorted(map(str, seen))} where 0 … {wanted - 1} are right"
    return ""


def _wanted(exchange: Exchange) -> int | None:
    """How many choices were asked for; None when that cannot be told."""
    fields = exchange.fields
    if fields is None:
        return None
    n = fields.get("n") or 1
    prompt = fields.get("prompt")
    many = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return n * many if isinstance(n, int) else None


def _usage_chunk(exchange: Exchange) -> str:
    options = (exchange.fields or {}).get("stream_options") or {}
    if not isinstance(options, dict) or exchange.events.error is not None or exchange.fields is None:
        return ""
    chunks = exchange.events.chunks
    carrying = [number for number, chunk in enumerate(chunks) if chunk.get("usage") is not None]
    if options.get("continuous_usage_stats") and options.get("include_usage"):
        missing = len(chunks) - len(carrying)
        return f"{missing} chunks without the running usage" if missing else ""
    if not options.get("include_usage"):
        return "usage in a stream that did not ask for it" if carrying else ""
    if carrying != [len(chunks) - 1]:
        return f"usage is in chunks {carrying[:6]} of {len(chunks)}, not in the last alone"
    return "" if chunks[-1].get("choices") == [] else "the usage chunk has choices"


def _usage_sums(exchange: Exchange) -> str:
    for body in _bodies(exchange):
        if body.get("usage") is not None and (problem := shapes.first(shapes.usage_problems(body["usage"]))):
            return problem
    return ""


def _token_limit(exchange: Exchange) -> str:
    fields = exchange.fields or {}
    limit = fields.get("max_completion_tokens") if exchange.chat else None
    limit = fields.get("max_tokens") if limit is None else limit
    wanted = _wanted(exchange)
    usage = next(body["usage"] for body in reversed(_bodies(exchange)) if body.get("usage") is not None)
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not isinstance(limit, int) or limit < 0 or wanted is None or not isinstance(count, int):
        return ""
    return f"{count} completion tokens of {wanted} choices with a limit of {limit}" if count > limit * wanted else ""
