"""What every request field is, in words and as JSON schema, read from its declaration.

Types, ranges, classes and synonyms come from the annotations, meanings from the docstring below a field; what a
declaration cannot hold (the effective default, a meaning everyone knows) is in ``NOTES``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from frontend.request import fields, messages
from frontend.request.fields import Rule

REF = "#/components/schemas/{name}"
Schema = dict[str, Any]


@dataclass(frozen=True)
class Note:
    """What a declaration does not say."""

    meaning: str = ""
    default: str = ""


NOTES: Mapping[str, Note] = {
    "model": Note("A served name."),
    "messages": Note("The conversation so far."),
    "prompt": Note("Text, token ids, or a list of either."),
    "max_tokens": Note("Most output tokens; −1 is no limit.", "16 for completions, the rest of the context for chat"),
    "max_completion_tokens": Note("The same, and wins over `max_tokens`.", "`max_tokens`"),
    "min_tokens": Note("Nothing ends the output before so many tokens.", "0"),
    "stop": Note("Texts that end the output.", "none"),
    "stop_token_ids": Note("Ids that end the output.", "none"),
    "ignore_eos": Note("The model's end tokens do not end the output.", "false"),
    "temperature": Note("0 takes the likeliest token.", "generation_config.json, else 1"),
    "top_p": Note("Nucleus of the likeliest tokens.", "generation_config.json, else 1"),
    "top_k": Note("Only the k likeliest tokens; 0 and −1 are off.", "generation_config.json, else off"),
    "min_p": Note("Only tokens at least so likely, relative to the likeliest.", "0"),
    "presence_penalty": Note("Taken off tokens that occurred in the output.", "0"),
    "frequency_penalty": Note("Taken off tokens for each time they occurred in the output.", "0"),
    "repetition_penalty": Note("Divides logits of tokens seen so far.", "generation_config.json, else 1"),
    "seed": Note("The same request with the same seed samples the same.", "random"),
    "n": Note("Answers to each prompt.", "1"),
    "best_of": Note(default="`n`"),
    "logprobs": Note("Log probabilities of output tokens.", "off"),
    "top_logprobs": Note("Likeliest tokens told beside each.", "0"),
    "prompt_logprobs": Note("Log probabilities of prompt tokens.", "off"),
    "echo": Note("The prompt comes before the output.", "false"),
    "return_token_ids": Note("Adds the ids of prompt and output.", "false"),
    "return_tokens_as_token_ids": Note(default="`--return-tokens-as-token-ids`, else false"),
    "skip_special_tokens": Note("Special tokens are left out of the text.", "true"),
    "include_stop_str_in_output": Note("The text that ended the output is part of it.", "false"),
    "add_special_tokens": Note("The tokenizer's own tokens around the prompt.", "true for completions, false for chat"),
    "truncate_prompt_tokens": Note(default="off"),
    "cache_salt": Note(default="none"),
    "stream": Note("Server-sent events.", "false"),
    "stream_options": Note("Only with `stream`.", "none"),
    "include_usage": Note(default="`--force-include-usage`, else false"),
    "continuous_usage_stats": Note(default="false"),
    "priority": Note("Lower runs earlier.", "0, but never below the key's floor"),
    "timeout": Note(default="none"),
    "request_id": Note("Echoed as `x-request-id`.", "one is made"),
    "add_generation_prompt": Note("The prompt ends where the answer begins.", "true"),
    "continue_final_message": Note("The answer goes on with the last message.", "false"),
    "chat_template_kwargs": Note("Variables for the template.", "`--default-chat-template-kwargs`"),
    "chat_template": Note(default="the model's"),
    "documents": Note("Handed to the template.", "none"),
    "return_token_strs": Note(default="true"),
    "tokens": Note("The ids."),
    "logit_bias": Note(default="none"),
    "allowed_token_ids": Note("Only these are ever sampled.", "all"),
    "bad_words": Note(default="none"),
}

_ERRORS = {
    "model": "404 `model_not_found`",
    "messages": "400 `context_length_exceeded` when the prompt fills the context",
    "prompt": "400 `context_length_exceeded` when the prompt fills the context",
    "max_tokens": "clamped and named in `x-clamped`; 400 under `--strict-limits`",
    "best_of": "400 `unsupported_parameter`",
    "chat_template": "400 `unsupported_parameter`",
    "logit_bias": "400 `invalid_type` or `invalid_value`, at `logit_bias.ID`",
    "max_completion_tokens": "clamped and named in `x-clamped`; 400 under `--strict-limits`",
}


@dataclass(frozen=True)
class FieldDoc:
    """One field of one request."""

    name: str
    kind: str
    """honoured, inert or refused."""
    type: str
    default: str
    meaning: str
    error: str
    synonyms: tuple[str, ...]
    schema: Schema


def describe(struct: type[msgspec.Struct]) -> list[FieldDoc]:
    """Every field of a request, in the order of its declaration."""
    table = fields.table_of(struct)
    properties = schemas_of(struct)[struct.__name__]["properties"]
    docs = docstrings(struct)
    others: dict[str, list[str]] = {}
    for other, name in table.synonyms.items():
        others.setdefault(name, []).append(other)
    return [
        _describe(rule, properties[rule.name], docs.get(rule.name, ""), tuple(others.get(rule.name, ())))
        for rule in table.rules.values()
    ]


def _describe(rule: Rule, declared: Schema, docstring: str, synonyms: tuple[str, ...]) -> FieldDoc:
    note = NOTES.get(rule.name, Note())
    kind = "refused" if rule.refused else "inert" if rule.inert else "honoured"
    schema = {key: value for key, value in declared.items() if key not in ("default", "description")}
    if rule.name == "messages":
        schema = {"type": "array", "minItems": 1, "items": {"$ref": REF.format(name="ChatMessage")}}
    error = _ERRORS.get(rule.name, "400 `invalid_type` or `invalid_value`")
    default = "required" if rule.required else note.default or "none"
    meaning = docstring or note.meaning
    if rule.refused:
        neutral = [None, [], {}, *rule.refused.neutral]
        schema = {"enum": neutral}
        meaning = f"Not offered. {docstring}".strip()
        error, default = "400 `unsupported_parameter`", "none"
    elif rule.inert:
        meaning, default = docstring or "Accepted; changes nothing.", "none"
    return FieldDoc(rule.name, kind, in_words(schema), default, meaning, error, synonyms, schema)


def request_schemas(struct: type[msgspec.Struct]) -> dict[str, Schema]:
    """JSON schemas, by name, of a request and of what it refers to; null, and under its synonyms, as it is read."""
    made = {
        name: schema
        for name, schema in schemas_of(struct).items()
        if name != struct.__name__ and name not in _nested_names(struct)
    }
    for kind in (struct, *_nested(struct)):
        properties: dict[str, Schema] = {}
        required: list[str] = []
        for doc in describe(kind):
            schema = {**doc.schema, "description": doc.meaning, "x-headrace-class": doc.kind}
            if doc.default == "required":
                required.append(doc.name)
            else:
                schema = _with_null(schema)
            properties[doc.name] = schema
            for other in doc.synonyms:
                properties[other] = {**schema, "description": f"The same as `{doc.name}`."}
        made[kind.__name__] = {
            "type": "object",
            "description": inspect.getdoc(kind) or "",
            "properties": properties,
            **({"required": required} if required else {}),
        }
    if "messages" in made[struct.__name__]["properties"]:
        made["ChatMessage"] = message_schema()
    return made


def message_schema() -> Schema:
    """A chat message, as ``messages.check`` wants it."""
    part = {
        "type": "object",
        "properties": {
            "type": {"enum": sorted(messages.TEXT_PARTS)},
            **{key: {"type": "string"} for key in sorted(set(messages.TEXT_PARTS.values()))},
        },
        "required": ["type"],
    }
    content = {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": part}]}
    return {
        "type": "object",
        "description": "One message; what else it has is handed to the template.",
        "properties": {
            "role": {"enum": sorted(messages.ROLES)},
            "content": content,
            "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["role"],
    }


@functools.cache
def schemas_of(struct: type[msgspec.Struct]) -> dict[str, Schema]:
    """The schemas that the declaration alone gives, by name."""
    _, components = msgspec.json.schema_components([struct], ref_template=REF)
    return components


def docstrings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The string below each field, of a struct and those it is made from."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if not issubclass(base, msgspec.Struct) or base is msgspec.Struct:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                found[field.target.id] = " ".join(below.value.value.split())
    return found


def in_words(schema: Schema) -> str:
    """A schema as people say it: ``number 0 … 2``, ``list of up to 64 strings``."""
    if "anyOf" in schema:
        return " or ".join(in_words(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema:
        return _values(schema["enum"])
    if "$ref" in schema:
        name: str = schema["$ref"].rpartition("/")[2]
        return f"`{name}`"
    kind = schema.get("type", "any")
    if kind == "array":
        items = in_words(schema.get("items", {}))
        return f"list{_bounds(schema, 'minItems', 'maxItems')} of {items}"
    if kind == "string":
        return f"string{_bounds(schema, 'minLength', 'maxLength', unit=' characters')}"
    if kind in ("number", "integer"):
        return f"{kind}{_range(schema)}"
    return f"{kind}{_bounds(schema, 'minProperties', 'maxProperties')}"


def _range(schema: Schema) -> str:
    low, above, high = (schema.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
    if above is not None:
        return f" above {_number(above)}" + (f", at most {_number(high)}" if high is not None else "")
    if low is not None and high is not None:
        return f" {_number(low)} … {_number(high)}"
    return f" ≥ {_number(low)}" if low is not None else f" ≤ {_number(high)}" if high is not None else ""


def _bounds(schema: Schema, low: str, high: str, unit: str = "") -> str:
    least, most = schema.get(low, 0), schema.get(high)
    if most is None:
        return f" of at least {least}{unit}" if least else ""
    return f" of {least} to {_number(most)}{unit}" if least else f" of up to {_number(most)}{unit}"


def _number(value: float) -> str:
    for exponent in (63, 31, 18):
        if value in (2**exponent - 1, 2**exponent):
            return f"2^{exponent}" + ("−1" if value == 2**exponent - 1 else "")
        if value == -(2**exponent):
            return f"−2^{exponent}"
    return f"{value:,g}".replace("-", "−") if abs(value) < 1e6 else f"{int(value):,}"


def _values(values: list[Any]) -> str:
    return ", ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values)


def _with_null(schema: Schema) -> Schema:
    options = schema.get("anyOf")
    if "enum" in schema or (not schema.get("type") and options is None and "$ref" not in schema):
        return schema  # null is among the values, or anything goes
    if options is not None and {"type": "null"} in options:
        return schema
    about = {key: value for key, value in schema.items() if key in ("description", "x-headrace-class")}
    bare = {key: value for key, value in schema.items() if key not in about}
    return {"anyOf": [*(options or [bare]), {"type": "null"}], **about}


def _nested(struct: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    return [rule.nested for rule in fields.table_of(struct).rules.values() if rule.nested is not None]


def _nested_names(struct: type[msgspec.Struct]) -> set[str]:
    return {kind.__name__ for kind in _nested(struct)}
