"""Whole answers and streams of the fake server, with what can be wrong about them."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

from tests.headrace.lint import fake_model as model

CREATED = 1_800_000_000
counter = itertools.count(1)


class Answers:
    """Builds bodies; ``quirks`` are the ways in which they are wrong."""

    def __init__(self, quirks: frozenset[str]) -> None:
        self._quirks = quirks

    def whole(
        self, chat: bool, prompts: list[list[int]], fields: dict[str, Any], limit: int, cached: int
    ) -> dict[str, Any]:
        """The non-streaming body."""
        n = fields.get("n") or 1
        made = [model.choice(prompt, fields, limit, i, self._quirks) for prompt in prompts for i in range(n)]
        choices = []
        for index, one in enumerate(made):
            prompt = prompts[index // n]
            choices.append(self._choice(chat, index, one, prompt, fields))
        body = {
            "id": ("chatcmpl-" if chat else "cmpl-")
            + ("same" if "same ids" in self._quirks else f"{next(counter):08x}"),
            "object": "chat.completion" if chat else "text_completion",
            "created": CREATED,
            "model": fields["model"],
            "system_fingerprint": "fp_fake",
            "choices": choices,
            "usage": self._usage(prompts, made, cached),
        }
        if fields.get("service_tier"):
            body["service_tier"] = "default"
        if fields.get("return_token_ids"):
            body["prompt_token_ids"] = prompts[0]
        if "usage null" in self._quirks:
            body["usage"] = None
        return body

    def _choice(
        self, chat: bool, index: int, one: model.Choice, prompt: list[int], fields: dict[str, Any]
    ) -> dict[str, Any]:
        text = one.text.replace("🦦", "\ufffd\ufffd") if "broken emoji" in self._quirks else one.text
        made: dict[str, Any] = {
            "index": index,
            "logprobs": None,
            "finish_reason": one.finish,
            "stop_reason": one.reason,
        }
        wanted = fields.get("logprobs")
        if chat:
            made["message"] = {"role": "assistant", "content": text, "refusal": None}
            if "tool_calls null" in self._quirks:
                made["message"]["tool_calls"] = None
            if wanted:
                entries = [model.entry(token, fields.get("top_logprobs") or 0) for token in one.shown]
                made["logprobs"] = {"content": entries[1:] if "drops an entry" in self._quirks else entries}
        else:
            made["text"] = (model.decode(prompt) if fields.get("echo") else "") + text
            if wanted is not None:
                made["logprobs"] = self._arrays(one, prompt if fields.get("echo") else [], wanted)
        if fields.get("return_token_ids"):
            made["token_ids"] = one.ids
        return made

    def _arrays(self, one: model.Choice, prompt: list[int], top: int) -> dict[str, Any]:
        arrays = model.arrays(prompt + one.shown, top)
        if prompt:
            for name in ("token_logprobs", "top_logprobs"):
                if arrays[name]:
                    arrays[name][0] = None
        if "scores start with 0" in self._quirks and prompt:
            arrays["token_logprobs"][0] = 0.0
        return arrays

    def _usage(self, prompts: list[list[int]], made: list[model.Choice], cached: int) -> dict[str, Any]:
        prompt = sum(map(len, prompts))
        completion = sum(len(one.shown if "EOS not counted" in self._quirks else one.ids) for one in made)
        if "counts one choice" in self._quirks:
            completion = len(made[0].ids)
        if "cached tokens left out" in self._quirks:
            prompt -= cached
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion + ("wrong total" in self._quirks),
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        if "no details" in self._quirks:
            usage["prompt_tokens_details"] = None
        return usage

    def events(self, chat: bool, body: dict[str, Any], fields: dict[str, Any]) -> Iterator[bytes]:
        """The same answer as a stream."""
        chunks = list(self._chunks(chat, body, fields))
        quirks = self._quirks
        for number, chunk in enumerate(chunks):
            if "id changes" in quirks and number:
                chunk["id"] += f"-{number}"
            yield self._event(chunk)
            if "ends without [DONE]" in quirks and number == len(chunks) - 1:
                return
        if "error line" in quirks:
            yield b"error: {}\n\n"
        yield b"data: [DONE]\n\n"
        if "two [DONE]" in quirks:
            yield b"data: [DONE]\n\n"

    def _event(self, chunk: dict[str, Any]) -> bytes:
        data = json.dumps(chunk, ensure_ascii="raw text" not in self._quirks)
        if "NaN in a stream" in self._quirks:
            data = data[:-1] + ', "score": NaN}'
        prefix = "data:" if "no space after data" in self._quirks else "data: "
        return f"{prefix}{data}{chr(10) if 'one line break' in self._quirks else chr(10) * 2}".encode()

    def _chunks(self, chat: bool, body: dict[str, Any], fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        options = fields.get("stream_options") or {}
        head = {name: body[name] for name in ("id", "created", "model", "system_fingerprint")}
        head["object"] = "chat.completion.chunk" if chat else "text_completion"
        running = bool(options.get("continuous_usage_stats")) or "usage everywhere" in self._quirks
        pieces = list(self._pieces(chat, body["choices"]))
        for number, choice in enumerate(pieces):
            usage = {
                **body["usage"],
                "completion_tokens": body["usage"]["completion_tokens"] * number // max(1, len(pieces) - 1),
            }
            usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
            extra = {"prompt_token_ids": body["prompt_token_ids"]} if "prompt_token_ids" in body and not number else {}
            yield {**head, "choices": [choice], **extra, **({"usage": usage} if running else {})}
        if options.get("include_usage") and "no usage chunk" not in self._quirks:
            yield {**head, "choices": [], "usage": body["usage"]}

    def _pieces(self, chat: bool, choices: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        quirks = self._quirks
        if chat and "no role" not in quirks:
            for choice in choices:
                yield {
                    "index": choice["index"],
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
        for choice in choices:
            index = 0 if "index 0" in quirks else choice["index"]
            text = choice["message"]["content"] if chat else choice["text"]
            cuts = [text[at : at + 7] for at in range(0, len(text), 7)] or [""]
            if "loses the tail" in quirks and len(cuts) > 1:
                cuts.pop()
            if "sums for deltas" in quirks:
                cuts = list(itertools.accumulate(cuts))
            if "half characters" in quirks:
                cuts = [cut.replace("🦦", "\ufffd") for cut in cuts]
            for number, cut in enumerate(cuts):
                last = number == len(cuts) - 1
                yield self._piece(chat, choice, index, cut, number, last)
            if "two finishes" in quirks:
                said = {"delta": {}} if chat else {"text": ""}
                yield {"index": index, **said, "logprobs": None, "finish_reason": "stop"}

    def _piece(
        self, chat: bool, choice: dict[str, Any], index: int, cut: str, number: int, last: bool
    ) -> dict[str, Any]:
        quirks = self._quirks
        piece: dict[str, Any] = {
            "index": index,
            "logprobs": None,
            "finish_reason": choice["finish_reason"] if last else None,
        }
        piece |= {"delta": {"content": cut}} if chat else {"text": cut}
        if last:
            piece["stop_reason"] = choice["stop_reason"]
            if "no finish" in quirks:
                piece["finish_reason"] = None
            if "stop in streams" in quirks and piece["finish_reason"] == "length":
                piece["finish_reason"] = "stop"
        if not number:
            # All of it rides with the first delta; where it rides is not what these tests are about.
            if "token_ids" in choice:
                piece["token_ids"] = choice["token_ids"]
            if "no logprobs in streams" not in quirks:
                piece["logprobs"] = copy.deepcopy(choice["logprobs"])
        if "finish key missing" in quirks and not last:
            del piece["finish_reason"]
        if "null calls in deltas" in quirks and chat:
            piece["delta"]["tool_calls"] = None
        return piece
