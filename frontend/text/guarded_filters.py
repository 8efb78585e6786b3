"""jinja2's filters, each made to charge for what it makes before or after it makes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from frontend.text import sizing
from frontend.text.budget import RenderLimitExceeded

Charge = Callable[[int], None]

_SLOW = ("pprint", "urlize", "wordwrap", "striptags", "title", "xmlattr")
_SLOW_LIMIT = 1 << 18
"""Filters whose cost is far above one pass over their input take at most this many characters."""


def guard_filters(filters: dict[str, Callable[..., Any]], charge: Charge) -> None:
    """Replace every filter in the table by one that charges."""
    for name, function in filters.items():
        filters[name] = _guarded(name, function, charge)


def _guarded(name: str, function: Callable[..., Any], charge: Charge) -> Callable[..., Any]:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or the environment comes before the value
    estimate = _ESTIMATES.get(name, _nothing)
    needs_list = name in ("join", "sum", "batch", "slice")

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if len(args) > first:
            if needs_list and isinstance(args[first], Iterator):
                args = (*args[:first], list(args[first]), *args[first + 1 :])
            charge(estimate(args[first], args[first + 1 :], kwargs))
            if name in _SLOW and sizing.text_size(args[first]) > _SLOW_LIMIT:
                raise RenderLimitExceeded(f"the filter {name} takes at most {_SLOW_LIMIT} characters")
        result = function(*args, **kwargs)
        charge(sizing.size_of(result))
        return result

    return guarded


def _nothing(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return 0


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return max((value for value in (*args, *kwargs.values()) if isinstance(value, int)), default=0)


def _padded(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return sizing.text_size(value) + _numbers(args, kwargs)


def _indented(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    text = str(value)
    width = max(_numbers(args, kwargs), 4, sizing.longest((*args, *kwargs.values())))
    return len(text) + (text.count("\n") + 1) * width


def _wrapped(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return sizing.text_size(value) * (1 + sizing.longest((*args, *kwargs.values())))


def _replaced(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    old = args[0] if args else kwargs.get("old", "")
    new = args[1] if len(args) > 1 else kwargs.get("new", "")
    return sizing.replacement(str(value), old, new)


def _joined(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    parts = list(value) if isinstance(value, list | tuple | dict | str) else []
    return sizing.joined(args[0] if args else kwargs.get("d", ""), parts)


def _formatted(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return sizing.percent(str(value), args or tuple(kwargs.values()))


def _summed(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    if isinstance(value, list | tuple) and any(isinstance(item, list | tuple | str) for item in value):
        return sum(map(sizing.size_of, value)) * (1 + len(value))
    return 0


def _divided(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return sizing.size_of(value) + _numbers(args, kwargs)


def _json(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return _numbers(args, kwargs)


_ESTIMATES: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], int]] = {
    "center": _padded,
    "indent": _indented,
    "replace": _replaced,
    "join": _joined,
    "format": _formatted,
    "sum": _summed,
    "batch": _divided,
    "slice": _divided,
    "round": _padded,
    "tojson": _json,
    "wordwrap": _wrapped,
    "truncate": _padded,
}
