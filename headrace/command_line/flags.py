"""Command-line flags: one table for all roles, read from command line, environment and configuration file.

Knows how a flag is written and read; which flags there are is in ``flag_table``, what they mean each command's matter.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from headrace.command_line.foreign_flags import Foreign, by_name
from headrace.command_line.usage_error import UsageError

__all__ = ["Flag", "Parsed", "UsageError", "parse_flags"]

ENVIRONMENT_PREFIX = "HEADRACE_"
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class Flag:
    """One setting. Its key in results, configuration files and struct fields is the name with underscores."""

    name: str
    help: str
    parse: Callable[[str], Any] = str
    aliases: tuple[str, ...] = ()
    metavar: str = ""
    choices: tuple[str, ...] = ()
    many: bool = False
    """Takes one or more words; the value is a tuple."""
    switch: bool = False
    """Takes no value."""
    negatable: bool = False
    """A switch that is on without being asked for: ``--no-NAME`` turns it off."""
    key: str = field(default="")
    guards: bool = False
    """A door would stand open without it: its environment variable may not be set and empty."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.key or self.name.replace("-", "_"))

    @property
    def spellings(self) -> tuple[str, ...]:
        return (f"--{self.name}", *self.aliases, *self.negations)

    @property
    def negations(self) -> tuple[str, ...]:
        """What turns it off."""
        return (f"--no-{self.name}",) if self.negatable else ()

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return ENVIRONMENT_PREFIX + self.name.replace("-", "_").upper()


@dataclass(frozen=True)
class Parsed:
    """What was given, and only that: defaults belong to whoever uses the values."""

    values: dict[str, Any]
    notices: list[str]


def parse_flags(
    command: str,
    description: str,
    flags: Sequence[Flag],
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    foreign: Foreign | None = None,
    model_argument: bool = False,
) -> Parsed:
    """Values by key; the command line wins over the environment, which wins over ``--config``.

    Raises UsageError. ``--help`` prints and raises SystemExit, as argparse does.
    """
    notices: list[str] = []
    known = {spelling: flag for flag in flags for spelling in flag.spellings}
    foreign = foreign or Foreign(())
    rest = _take_foreign(command, list(arguments), known, foreign, notices)
    parser = _parser(command, description, flags, model_argument)
    given = _given(parser, rest)
    if model_argument and (word := given.pop("model_word", None)) is not None:
        if given.get("model", word) != word:
            raise UsageError(f"two models: {word!r} and --model {given['model']!r}")
        given["model"] = word
    values = _from_environment(flags, environment)
    config = given.pop("config", None) or values.pop("config", None)
    from_file = _from_file(command, config, flags, foreign, notices) if config else {}
    return Parsed({**from_file, **values, **given}, notices)


def integer(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a whole number") from None


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = integer(text)
    if value < 1:
        raise UsageError(f"{value} is less than 1")
    return value


def tokens(text: str) -> int:
    """A count of tokens: a number, or with vLLM's suffixes: 8k is 8,000 and 8K is 8,192."""
    factor = {"k": 1000, "K": 1024}.get(text[-1:], 1)
    return positive(text[:-1] if factor > 1 else text) * factor


def tokens_or_zero(text: str) -> int:
    """A count of tokens, or 0."""
    return 0 if text == "0" else tokens(text)


def number(text: str) -> float:
    """A number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number") from None
    if not 0 <= value < float("inf"):
        raise UsageError(f"{text} is not a number of at least 0")
    return value


def fraction(text: str) -> float:
    """A number in (0, 1]."""
    value = number(text)
    if not 0 < value <= 1:
        raise UsageError(f"{text} is not in (0, 1]")
    return value


def size(text: str) -> int:
    """Bytes: 512MiB, 4GB, 1g, or a plain number."""
    digits = text.rstrip("bBiIkKmMgGtT ")
    unit = text[len(digits) :].strip().lower().removesuffix("b")
    if unit not in UNITS:
        raise UsageError(f"{text!r} is not a size; write 512MiB or 4GB")
    try:
        value = int(float(digits) * UNITS[unit])
    except (ValueError, OverflowError):
        raise UsageError(f"{text!r} is not a size; write 512MiB or 4GB") from None
    if value < 1:
        raise UsageError(f"{text!r} is not a positive size")
    return value


def size_or_zero(text: str) -> int:
    """Bytes, or 0."""
    return 0 if text == "0" else size(text)


def port(text: str) -> int:
    """A TCP port; 0 is any free one."""
    value = integer(text)
    if not 0 <= value <= 65535:
        raise UsageError(f"{value} is not a port, 0 to 65535")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError("not a JSON object")
    return value


def quantization(text: str) -> str:
    """What weights become when they are loaded; empty when they stay as the model brings them."""
    return {"none": "", "gguf": ""}.get(_one_of(text, ("none", "gguf", "int8")), text)


def dtype(text: str) -> str:
    """A precision, under vLLM's other names for it too."""
    name = {"half": "float16", "float": "float32"}.get(text, text)
    return _one_of(name, ("auto", "float32", "bfloat16", "float16"))


def alternatives(text: str) -> int:
    """How many alternatives to a token may be asked for."""
    value = integer(text)
    if not 0 <= value <= 20:
        raise UsageError(f"{value} is not in 0 to 20; more alternatives are never given")
    return value


def cert_reqs(text: str) -> int:
    """Whether client certificates are asked for: 0 to 2, as Python's ssl module has it, or in words."""
    names = ("none", "optional", "required")
    return names.index(_one_of(names[int(text)] if text in ("0", "1", "2") else text, names))


def generation_config(text: str) -> str:
    """Where sampling defaults come from; vLLM calls the API's own "vllm"."""
    return _one_of({"vllm": "none"}.get(text, text), ("auto", "none"))


def tokenizer(text: str) -> str:
    """Which vocabulary."""
    if text not in ("model", "byte"):
        raise UsageError(f"{text!r} is none of model, byte; a tokenizer apart from the model's is not read")
    return text


def _one_of(text: str, choices: Sequence[str]) -> str:
    if text not in choices:
        raise UsageError(f"{text!r} is none of {', '.join(choices)}")
    return text


def _take_foreign(
    command: str, arguments: Sequence[str], known: Mapping[str, Flag], foreign: Foreign, notices: list[str]
) -> list[str]:
    """The words with foreign flags in ours; refuses what cannot be and anything unknown, by name."""
    ours: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*ours, word, *words]
        name, equals, value = word.partition("=")
        # vLLM lets underscores stand for dashes; so do we.
        name = name.replace("_", "-") if name.startswith("--") else name
        if name not in known and name in foreign:
            made, taken = foreign.take(name, value if equals else None, words, notices)
            if made and made[0] not in known:
                raise UsageError(f"{name}: headrace {command} has no {made[0]}; it is a flag of headrace serve")
            ours.extend(made)
            del words[:taken]
        elif not name.startswith("--") or name == "--help" or name in known:
            ours.append(name + equals + value)
        else:
            close = difflib.get_close_matches(name, known, 1, 0.75)
            hint = f"did you mean {close[0]}?" if close else f"see headrace {command} --help"
            raise UsageError(f"{name} is not a flag of headrace {command}; {hint}")
    return ours


class _Parser(argparse.ArgumentParser):
    """argparse that raises one line instead of printing usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser(command: str, description: str, flags: Sequence[Flag], model_argument: bool) -> _Parser:
    parser = _Parser(prog=f"headrace {command}", description=description, allow_abbrev=False)
    if model_argument:
        parser.add_argument("model_word", nargs="?", metavar="MODEL", help="a directory, a .gguf file or a hub name")
    for flag in flags:
        if flag.switch:
            names = [name for name in flag.spellings if name not in flag.negations]
            parser.add_argument(*names, dest=flag.key, action="store_const", const=True, help=flag.help)
            if flag.negations:
                parser.add_argument(*flag.negations, dest=flag.key, action="store_const", const=False, help="not so")
            continue
        parser.add_argument(
            *flag.spellings,
            dest=flag.key,
            type=_argument_type(flag),
            nargs="+" if flag.many else None,
            metavar=flag.metavar or ("|".join(flag.choices) if flag.choices else flag.name.rpartition("-")[2].upper()),
            help=flag.help,
        )
    return parser


def _given(parser: _Parser, words: Sequence[str]) -> dict[str, Any]:
    """What the words say, and only that."""
    values = {key: value for key, value in vars(parser.parse_args(words)).items() if value is not None}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


def _argument_type(flag: Flag) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return _value(flag, text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _value(flag: Flag, text: str) -> Any:
    return flag.parse(_one_of(text, flag.choices) if flag.choices else text)


def _from_environment(flags: Iterable[Flag], environment: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for flag in flags:
        text = environment.get(flag.variable, "")
        if flag.guards and flag.variable in environment and not text.strip():
            raise UsageError(f"{flag.variable} is set and empty; unset it, or give it a value")
        if text:
            values[flag.key] = _read(flag, text.split() if flag.many else text, flag.variable)
    return values


def _read(flag: Flag, value: Any, source: str) -> Any:
    """A value from the environment or a file, checked as on the command line. None: no to a switch that is off."""
    try:
        if flag.switch:
            if str(value).lower() in ("1", "true", "yes", "on"):
                return True
            if str(value).lower() in ("0", "false", "no", "off"):
                return False if flag.negatable else None
            raise UsageError(f"{value!r} is neither true nor false")
        if flag.many:
            return tuple(_value(flag, str(word)) for word in (value if isinstance(value, list) else [value]))
        return _value(flag, json.dumps(value) if isinstance(value, dict) else str(value))
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _from_file(command: str, name: str, flags: Sequence[Flag], foreign: Foreign, notices: list[str]) -> dict[str, Any]:
    by_word = {flag.name.replace("-", "_"): flag for flag in flags} | {flag.key: flag for flag in flags}
    others = by_name(foreign)
    values: dict[str, Any] = {}
    for word, value in _load_file(Path(name)).items():
        flag = by_word.get(str(word).replace("-", "_"))
        if flag is not None:
            if value is not None and (read := _read(flag, value, f"{name}: {word}")) is not None:
                values[flag.key] = read
        elif str(word).replace("_", "-") in others:
            values.update(_foreign_in_file(f"{name}: ", str(word), value, flags, foreign, notices))
        else:
            close = difflib.get_close_matches(str(word).replace("_", "-"), [flag.name for flag in flags], 1, 0.75)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"{name}: {word} is not a flag of headrace {command}{hint}")
    return values


def _foreign_in_file(
    source: str, word: str, value: Any, flags: Sequence[Flag], foreign: Foreign, notices: list[str]
) -> dict[str, Any]:
    """Values of ours for another server's line in a file."""
    name = word.replace("_", "-")
    if value is None:
        return {}
    is_off = value is False
    text = None if isinstance(value, bool) else value if isinstance(value, str) else json.dumps(value)
    spelling = f"--no-{name}" if is_off and f"--no-{name}" in foreign else f"--{name}"
    try:
        words, _ = foreign.take(spelling, text, (), notices)
        parser = _parser("", "", flags, model_argument=False)
        return _given(parser, words)
    except UsageError as error:
        raise UsageError(f"{source}{error}") from None


def _load_file(path: Path) -> dict[str, Any]:
    """A mapping of flag names to values: YAML, TOML or JSON by the file's suffix."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read --config {path}: {error}") from None
    try:
        content = _decode(text, path.suffix)
    except ValueError as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} does not hold a mapping of flags to values")
    return content


def _decode(text: str, suffix: str) -> Any:
    if suffix == ".toml":
        import tomllib

        return tomllib.loads(text)
    if suffix == ".json":
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
