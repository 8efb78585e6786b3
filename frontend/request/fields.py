"""Request fields by class: what a field's declaration says, and how a raw body is held against it.

A request is declared as a msgspec struct (see ``requests``). Each field's annotation carries its type and range, and
a marker when it is anything but plainly honoured; the declaration is the only table there is.
Knows nothing of what any field means.
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from frontend import errors

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

MAX_IGNORED_NAMES = 16
MAX_IGNORED_NAME = 64
TYPO_DISTANCE = 2
MAX_JUDGED = 32
"""Unknown fields looked at for a typo; a body with more has the rest ignored unread."""
MAX_CONTAINERS = 100_000
"""Arrays and objects of a body: millions of empty ones fit in one, and to make them would stop every other answer."""
SHOWN = 64
"""Characters of a refused value shown in a message."""


@dataclass(frozen=True)
class Inert:
    """Accepted and typed, and cannot change tokens."""


@dataclass(frozen=True)
class Refused:
    """Not offered (yet): anything but an absent or neutral value is a 400."""

    neutral: tuple[object, ...] = ()
    """Documented no-op values, besides null, [] and {}."""


@dataclass(frozen=True)
class Synonyms:
    """Other servers' names of the field; the values must agree when several are given."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """One field as its declaration describes it."""

    name: str
    required: bool
    refused: Refused | None
    inert: bool
    nested: type[msgspec.Struct] | None
    """The struct whose own rules hold inside, when the field is an object of known fields."""


@dataclass(frozen=True)
class Table:
    """All rules of a request."""

    rules: Mapping[str, Rule]
    synonyms: Mapping[str, str]
    """Other name → name."""


@dataclass
class Cleaned:
    """A body with absent, neutral and unknown fields taken out."""

    values: dict[str, Any]
    ignored: list[str] = field(default_factory=list)


@functools.cache
def table_of(struct: type[msgspec.Struct]) -> Table:
    """The rules in a struct's annotations."""
    rules: dict[str, Rule] = {}
    synonyms: dict[str, str] = {}
    hints = typing.get_type_hints(struct, include_extras=True)
    for info in msgspec.structs.fields(struct):
        markers = _markers(hints[info.name])
        refused = next((marker for marker in markers if isinstance(marker, Refused)), None)
        rules[info.encode_name] = Rule(
            name=info.encode_name,
            required=info.required,
            refused=refused,
            inert=any(isinstance(marker, Inert) for marker in markers),
            nested=_nested(hints[info.name]),
        )
        for marker in markers:
            if isinstance(marker, Synonyms):
                synonyms.update(dict.fromkeys(marker.names, info.encode_name))
    return Table(rules, synonyms)


def read(body: bytes, struct: type[RequestT], *, strict: bool = False) -> tuple[RequestT, list[str]]:
    """Decode a body into its struct, and name the fields that were ignored. Raises ApiError."""
    raw = _decode(body)
    if not isinstance(raw, dict):
        raise errors.invalid_type(None, f"The body must be a JSON object, not {_json_type(raw)}.")
    try:
        cleaned = _clean(raw, table_of(struct), strict=strict, prefix="")
        return msgspec.convert(cleaned.values, struct), cleaned.ignored
    except msgspec.ValidationError as error:
        raise _described(str(error), raw) from error
    except RecursionError as error:
        raise _too_deep() from error


def ignored_header(names: list[str]) -> str:
    """The value of ``x-ignored-fields``: bounded, and safe in a header whatever the client called its fields."""
    shown = (re.sub(r"[^A-Za-z0-9_.-]", _escape, name[:MAX_IGNORED_NAME])[:MAX_IGNORED_NAME] for name in names)
    return ", ".join(list(shown)[:MAX_IGNORED_NAMES])


def _decode(body: bytes) -> Any:
    if not body.strip():
        raise errors.ApiError(400, "The body is empty; send a JSON object.", code="invalid_json")
    _check_size(body)
    try:
        return msgspec.json.decode(body)
    except RecursionError as error:
        raise _too_deep() from error
    except (msgspec.DecodeError, ValueError) as error:
        raise errors.ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from error


_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A JSON string, also one that does not end: each byte of a body is looked at once."""


def count_containers(body: bytes) -> int:
    """Arrays and objects in JSON, without parsing it."""
    outside = _STRING.sub(b"", body)
    return outside.count(b"[") + outside.count(b"{")


def _check_size(body: bytes) -> None:
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > MAX_CONTAINERS and count_containers(body) > MAX_CONTAINERS:
        raise errors.ApiError(400, f"The body has more than {MAX_CONTAINERS} arrays and objects.", code="invalid_value")


def _too_deep() -> errors.ApiError:
    return errors.ApiError(400, "The body is nested too deeply.", code="invalid_json")


def _clean(raw: dict[str, Any], table: Table, *, strict: bool, prefix: str) -> Cleaned:
    cleaned = Cleaned({})
    sources: dict[str, str] = {}
    for given, value in raw.items():
        name = table.synonyms.get(given, given)
        rule = table.rules.get(name)
        if rule is None:
            if len(cleaned.ignored) < MAX_JUDGED:
                _judge_unknown(given, table, strict=strict, prefix=prefix)
                cleaned.ignored.append(prefix + given)
            continue
        if value is None or (not rule.required and value in ([], {})):
            continue
        if rule.refused is not None:
            if not _is_neutral(value, rule.refused.neutral):
                raise errors.unsupported(prefix + given)
            continue
        if rule.nested is not None and isinstance(value, dict):
            inner = _clean(value, table_of(rule.nested), strict=strict, prefix=f"{prefix}{given}.")
            value = inner.values
            cleaned.ignored.extend(inner.ignored)
        if name in cleaned.values and cleaned.values[name] != value:
            raise errors.invalid_value(
                prefix + given, f"'{sources[name]}' and '{given}' mean the same and have different values."
            )
        cleaned.values[name] = value
        sources[name] = given
    return cleaned


def _judge_unknown(name: str, table: Table, *, strict: bool, prefix: str) -> None:
    """Raise for an unknown field that is surely a mistake, or for any under strict."""
    shown = prefix + name[:SHOWN]
    if name == "extra_body" and not prefix:
        raise errors.unknown_field(
            "extra_body", "'extra_body' is an argument of the Python client: merge it into the top level of the body."
        )
    close = _closest(name, [*table.rules, *table.synonyms])
    if close is not None:
        raise errors.unknown_field(shown, f"Unknown parameter: '{shown}'. Did you mean '{prefix}{close}'?")
    if strict:
        raise errors.unknown_field(shown, f"Unknown parameter: '{shown}'.")


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    # 1 == True in Python and not in JSON.
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def _closest(name: str, known: list[str]) -> str | None:
    """The known name that this one is a slip of; a name so short that all of it would be the slip is none."""
    near = [
        other
        for other in known
        if abs(len(name) - len(other)) <= TYPO_DISTANCE < min(len(name), len(other))
        and _distance(name, other) <= TYPO_DISTANCE
    ]
    return min(near, key=lambda other: _distance(name, other), default=None)


def _distance(left: str, right: str) -> int:
    """Edit distance; gives up as soon as it is sure to be beyond TYPO_DISTANCE."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
        if min(row) > TYPO_DISTANCE:
            break
    return min(row) if min(row) > TYPO_DISTANCE else row[-1]


_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")


def _described(message: str, values: dict[str, Any]) -> errors.ApiError:
    """msgspec's complaint as an error of ours."""
    match = _AT.match(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    param = path.lstrip(".")
    absent = _MISSING.match(what)
    if absent:
        return errors.missing(f"{param}.{absent['name']}" if param else absent["name"])
    what = what.replace("`", "").replace(" | null", "").replace(" | ", " or ")
    what = what[:1].lower() + what[1:]
    if ", got" in what:
        return errors.invalid_type(param or None, f"Invalid type for '{param}': {what}.")
    shown = values.get(param)
    got = f", got {_shown(shown)}" if isinstance(shown, int | float | str) else ""
    return errors.invalid_value(param, f"Invalid value for '{param}': {what}{got}.")


def _shown(value: float | str) -> str:
    text = msgspec.json.encode(value).decode() if isinstance(value, str | float) else _short_int(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def _short_int(value: int) -> str:
    return str(value) if abs(value) < 10**SHOWN else f"a number of {value.bit_length()} bits"


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return names.get(type(value), "null")


def _markers(hint: Any) -> list[object]:
    return list(hint.__metadata__) if typing.get_origin(hint) is typing.Annotated else []


def _nested(hint: Any) -> type[msgspec.Struct] | None:
    for part in (hint, *typing.get_args(hint)):
        if isinstance(part, type) and issubclass(part, msgspec.Struct):
            return part
    return None


def _escape(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())
