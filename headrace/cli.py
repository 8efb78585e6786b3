"""The ``headrace`` command. Every role is one of its subcommands; each is imported only when it is run.

A server starts several of these processes, so what is imported here is paid several times.
"""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "serve": "serve a model on this host: everything below, started and supervised",
    "chat": "talk with a running server in the terminal",
    "lint": "judge any server by the OpenAI wire contract, on the bytes it sends",
    "doctor": "judge a model's chat template",
    "trace": "read what a scheduler did, and replay it",
    "keys": "make the keys that encrypt sockets between hosts",
    "frontend": "HTTP role alone",
    "scheduler": "scheduler role alone",
    "workers": "launcher role alone: starts and keeps the ranks of a model",
}
INTERNAL = ("worker-rank", "ray-head")
"""Started by other commands only."""

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        return 0
    if command in ("-V", "--version", "version"):
        from headrace.supervision.announcer import version

        sys.stdout.write(f"headrace {version()}\n")
        return 0
    if command not in COMMANDS and command not in INTERNAL:
        sys.stderr.write(f"headrace: {command!r} is not a command; there are {', '.join(COMMANDS)}\n")
        return EXIT_USAGE
    module = importlib.import_module(f"headrace.commands.{command.replace('-', '_')}")
    try:
        status: int = module.main(arguments[1:])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def _overview() -> str:
    lines = [f"  {name:<11}{text}" for name, text in COMMANDS.items()]
    return (
        "headrace serves large language models behind the OpenAI wire contract.\n\n"
        "usage: headrace COMMAND [flags]      headrace COMMAND --help\n\n" + "\n".join(lines) + "\n\n"
        "Every flag can also be set as HEADRACE_<FLAG> in the environment or in the file given by --config.\n"
    )
