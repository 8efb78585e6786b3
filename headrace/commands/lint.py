"""``headrace lint``: hold any server that claims the OpenAI contract against it."""

from __future__ import annotations

from headrace.command_line.flag_table import LINT
from headrace.command_line.flags import UsageError
from headrace.commands.common import EXIT_USAGE, complain, parse, to_settings
from headrace.lint.command import LintError, LintSettings, run

DESCRIPTION = "Send a server every kind of request and judge its replies by the wire contract, byte by byte."


def main(arguments: list[str]) -> int:
    try:
        values = parse("lint", DESCRIPTION, LINT, _with_url_flag(arguments), model_argument=False)
        if "url" not in values:
            raise UsageError("which server? headrace lint http://127.0.0.1:8000")
        return run(to_settings(values, LintSettings))
    except UsageError as error:
        complain(str(error))
        return EXIT_USAGE
    except LintError as error:
        complain(str(error))
        return EXIT_USAGE


def _with_url_flag(arguments: list[str]) -> list[str]:
    """The URL may stand as a word of its own: first, or anywhere when it begins with http."""
    for at, word in enumerate(arguments):
        first = at == 0 and not word.startswith("-")
        if first or (word.startswith(("http://", "https://")) and arguments[at - 1] not in ("--url", "--json")):
            return ["--url", word, *arguments[:at], *arguments[at + 1 :]]
    return arguments
