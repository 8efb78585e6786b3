"""The command's first word chooses a role; whatever is wrong is one line and a status."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.cli import COMMANDS, EXIT_USAGE, main


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_without_a_command_all_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["surf"]) == EXIT_USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("headrace 0.")


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--xyzzy"),
        ("serve", "--port", "many"),
        ("serve", "--launcher", "kubernetes"),
        ("serve", "--enable-lora"),
        ("worker-rank",),
        ("ray-head",),
        ("chat", "--temperature", "hot"),
    ],
)
def test_a_command_line_that_cannot_be_followed_is_one_line_and_status_2(arguments: tuple[str, ...]) -> None:
    done = headrace(*arguments)
    assert done.returncode == EXIT_USAGE
    assert done.stderr.startswith("headrace: ") and done.stderr.count("\n") == 1, done.stderr


def test_help_of_a_command_names_its_flags() -> None:
    done = headrace("serve", "--help")
    assert done.returncode == 0
    for flag in ("--served-model-name", "--kv-cache-memory", "--launcher", "--groups", "--frontends", "MODEL"):
        assert flag in done.stdout


def test_no_role_is_imported_before_it_is_chosen() -> None:
    code = (
        "import sys; import headrace.cli\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'scheduler', 'frontend', 'workers', 'torch', 'ray', 'numpy', 'zmq', 'msgspec'}, loaded"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_serve_itself_holds_no_model_code() -> None:
    code = (
        "import sys; import headrace.commands.serve\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'scheduler', 'frontend', 'workers', 'torch', 'ray', 'transformers'}, loaded"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
