"""``headrace lint``: hold any server that claims the OpenAI contract against it."""

from __future__ import annotations

from headrace.commands.common import EXIT_USAGE, complain, parse, to_settings
from headrace.flag_table import LINT
from headrace.flags import UsageError
from headrace.lint.command import LintError, LintSettings, run

DESCRIPTION = "Send a server every kind of request and judge its replies by the wire contract, byte by byte."


def main(arguments: list[str]) -> int:
    try:
        rest = list(arguments)
        if rest and not rest[0].startswith("-"):
            rest[0:1] = ["--url", rest[0]]
        values = parse("lint", DESCRIPTION, LINT, rest, model_argument=False)
        if "url" not in values:
            raise UsageError("which server? headrace lint http://127.0.0.1:8000")
        return run(to_settings(values, LintSettings))
    except UsageError as error:
        complain(str(error))
        return EXIT_USAGE
    except LintError as error:
        complain(str(error))
        return EXIT_USAGE
