"""How large the result of an operation will be, known before it is carried out.

A template is a small program, and Python strings make it easy to ask for a gigabyte in one expression. These functions
give an upper estimate for every operation of strings and integers whose result can be much larger than what goes in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_MAX_INTEGER_BITS = 1 << 16
_WIDEST_ITEM = 10_000
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[#0\- +]*(\*|\d{5,}|\d*\.(\*|\d{5,}))")
"""A `%` item whose width or precision is an argument or has five digits or more."""
_WIDE_FIELD = re.compile(r"\{[^{}]*(\{|\d{5,})")
"""A `{}` item with an item inside it or with a number of five digits or more."""

TOO_LARGE = 1 << 60
"""An estimate that no limit allows."""


def size_of(value: Any) -> int:
    """Characters of a string, cells of a collection; numbers are free."""
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def product(left: Any, right: Any) -> int:
    """`left * right`"""
    if isinstance(left, int) and isinstance(right, int):
        return TOO_LARGE if left.bit_length() + right.bit_length() > _MAX_INTEGER_BITS else 0
    if isinstance(right, int):
        return size_of(left) * max(0, right)
    if isinstance(left, int):
        return size_of(right) * max(0, left)
    return 0


def power(left: Any, right: Any) -> int:
    """`left ** right`"""
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_INTEGER_BITS:
        return TOO_LARGE
    return 0


def total(left: Any, right: Any) -> int:
    """`left + right`"""
    return size_of(left) + size_of(right)


def percent(pattern: Any, arguments: Any) -> int:
    """`pattern % arguments`"""
    if not isinstance(pattern, str | bytes):
        return 0
    text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    if _WIDE_PERCENT.search(text):
        return TOO_LARGE
    values = arguments if isinstance(arguments, tuple) else (arguments,)
    return len(text) + text.count("%") * (_WIDEST_ITEM + longest(values))


def format_call(pattern: str, arguments: Iterable[Any]) -> int:
    """`pattern.format(*arguments)`"""
    plain = pattern.replace("{{", "").replace("}}", "")
    if _WIDE_FIELD.search(plain):
        return TOO_LARGE
    return len(pattern) + plain.count("{") * (_WIDEST_ITEM + longest(arguments))


def replacement(text: str, old: Any, new: Any) -> int:
    """`text.replace(old, new)`"""
    old, new = str(old), str(new)
    return len(text) + (text.count(old) if old else len(text) + 1) * len(new)


def joined(separator: Any, parts: list[Any]) -> int:
    """`separator.join(parts)`"""
    return sum(text_size(part) for part in parts) + size_of(separator) * len(parts)


def longest(values: Iterable[Any]) -> int:
    """Characters of the longest value, written out."""
    return max((text_size(value) for value in values), default=0)


def text_size(value: Any) -> int:
    """Characters of `str(value)`, at most."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 2
    if isinstance(value, Mapping):
        return 2 + sum(_quoted_size(key) + _quoted_size(item) + 4 for key, item in value.items())
    if isinstance(value, list | tuple):
        return 2 + sum(_quoted_size(item) + 2 for item in value)
    return 64


def _quoted_size(value: Any) -> int:
    return 10 * len(value) + 2 if isinstance(value, str | bytes) else text_size(value)


def method_call(name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """An upper estimate for a call of a built-in method of a string, bytes or an integer."""
    values = [*args, *kwargs.values()]
    largest = max((value for value in values if isinstance(value, int)), default=0)
    if name in ("center", "ljust", "rjust", "zfill", "to_bytes"):
        return size_of(owner) + largest
    if name == "expandtabs":
        return size_of(owner) * (1 + (largest or 8))
    if name == "replace" and isinstance(owner, str) and len(values) >= 2:
        return replacement(owner, values[0], values[1])
    if name == "replace" and isinstance(owner, bytes) and len(values) >= 2:
        return (size_of(owner) + 1) * (1 + size_of(values[1]))
    if name == "translate" and values and isinstance(values[0], Mapping):
        return size_of(owner) * (1 + longest(values[0].values()))
    if name == "join" and values and isinstance(values[0], list | tuple):
        return joined(owner, list(values[0]))
    return 0
