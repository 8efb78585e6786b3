"""curl, as people type it."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.answers import MODEL, PLAIN, PLAIN_TEXT, UNICODE, UNICODE_TEXT, ask
from tests.end_to_end.serve_process import ServeProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]

README = Path(__file__).parents[2] / "README.md"
ITS_SERVER = "http://127.0.0.1:8000"
ITS_MODEL = "SmolLM2-135M-Instruct"
SECONDS = 60.0


def curl(*arguments: str) -> bytes:
    done = subprocess.run(["curl", "--silent", "--show-error", *arguments], capture_output=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def readme_command() -> list[str]:
    """The first curl command of the README as a shell reads it."""
    _, fence, rest = README.read_text(encoding="utf-8").partition("```sh\ncurl ")
    command, end, _ = rest.partition("```")
    assert fence and end, "the README shows a curl command"
    return shlex.split(command.replace("\\\n", " "))


def test_the_command_of_the_readme_is_answered(server: ServeProcess) -> None:
    """As it stands there, but for the address and the model's name."""
    command = readme_command()
    assert any(ITS_SERVER in word for word in command) and any(ITS_MODEL in word for word in command)
    answer = json.loads(curl(*(w.replace(ITS_SERVER, server.url).replace(ITS_MODEL, MODEL) for w in command)))
    assert answer["choices"][0]["message"]["content"] == UNICODE_TEXT


def test_the_command_that_serve_prints_is_answered(server: ServeProcess) -> None:
    server.wait_for_line(r"^ +-d '", SECONDS)
    start = next(nth for nth, line in enumerate(server.lines) if line.lstrip().startswith("curl "))
    command = shlex.split(" ".join(line.rstrip("\\") for line in server.lines[start : start + 2]))
    assert json.loads(curl(*command[1:]))["choices"][0]["message"]["content"] == UNICODE_TEXT


def test_unbuffered_curl_prints_events_and_nothing_else(server: ServeProcess) -> None:
    body = json.dumps({"model": MODEL, "messages": ask(UNICODE), "stream": True})
    out = curl("-N", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body)
    *events, done, tail = out.decode().split("\n\n")
    assert (done, tail) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == UNICODE_TEXT


def test_curl_without_a_content_type_is_told_which_header_to_send(server: ServeProcess) -> None:
    body = json.dumps({"model": MODEL, "messages": ask(PLAIN)})
    out = curl(f"{server.url}/v1/chat/completions", "-d", body, "-w", "\n%{http_code}").decode()
    text, _, status = out.rpartition("\n")
    error = json.loads(text)["error"]
    assert status == "415" and "-H 'Content-Type: application/json'" in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_the_header_that_the_message_shows_is_the_right_one(server: ServeProcess) -> None:
    body = json.dumps({"model": MODEL, "messages": ask(PLAIN)})
    url = f"{server.url}/v1/chat/completions"
    message = json.loads(curl(url, "-d", body))["error"]["message"]
    told = shlex.split(message[message.index("-H ") :].rstrip("."))
    assert json.loads(curl(url, "-d", body, *told))["choices"][0]["message"]["content"] == PLAIN_TEXT


def test_curl_posts_a_body_of_chunks_and_compressed_answers_are_not_forced(server: ServeProcess) -> None:
    body = json.dumps({"model": MODEL, "messages": ask(PLAIN)})
    headers = ("-H", "Content-Type: application/json", "-H", "Transfer-Encoding: chunked", "--compressed")
    answer = json.loads(curl(f"{server.url}/v1/chat/completions", *headers, "-d", body))
    assert answer["choices"][0]["message"]["content"] == PLAIN_TEXT


@pytest.mark.parametrize("stream", [False, True])
def test_curl_of_http_1_0_gets_a_whole_body(server: ServeProcess, stream: bool) -> None:
    body = json.dumps({"model": MODEL, "messages": ask(PLAIN), "stream": stream})
    out = curl(
        "--http1.0", "--raw", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body
    )
    if stream:
        assert out.startswith(b"data: ") and out.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(out)["choices"][0]["message"]["content"] == PLAIN_TEXT


@pytest.mark.parametrize("size", [0, 2, 70_000])
def test_curls_expect_continue_is_understood(server: ServeProcess, tmp_path: Path, size: int) -> None:
    """curl asks before it sends a large body."""
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"model": MODEL, "messages": ask(PLAIN), "user": "x" * size}))
    headers = ("-H", "Content-Type: application/json", "-H", "Expect: 100-continue")
    out = curl(f"{server.url}/v1/chat/completions", *headers, "--data-binary", f"@{request}")
    assert json.loads(out)["choices"][0]["message"]["content"] == PLAIN_TEXT
