"""What a client sees of the prefix cache: cached_tokens, and who shares with whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.end_to_end.serve_process import serving

pytestmark = pytest.mark.slow

BLOCK = 16
STORY = "Once upon a time there was a mill, and the water that drove it came down a narrow race. "


def scripted(tmp_path: Path, *arguments: str) -> Any:
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"text": "The wheel turns."}) + "\n")
    return serving(
        *("--launcher", "local", "--engine", "scripted", "--tokenizer", "byte", "--engine-script", str(script)),
        *("--served-model-name", "m", *arguments),
    )


def cached(client: openai.OpenAI, prompt: str, *, streamed: bool = False, **body: Any) -> tuple[int, int]:
    """(prompt tokens, of them cached) as usage tells."""
    fields: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 4, **body}
    if streamed:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = client.completions.create(**fields, **options)
        usage = last.usage
    else:
        usage = client.completions.create(**fields).usage
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def test_usage_tells_what_was_cached_in_both_transports_and_salts_keep_apart(tmp_path: Path) -> None:
    with scripted(tmp_path) as server:
        # The client's schemas know neither chunks of completions nor prompt_logprobs.
        client = server.client(_strict_response_validation=False)
        length, found = cached(client, STORY)
        expected = (length - 1) // BLOCK * BLOCK
        assert found == 0 and expected >= 5 * BLOCK
        assert cached(client, STORY) == cached(client, STORY, streamed=True) == (length, expected)
        assert cached(client, STORY, n=3) == (length, expected), "a prompt counts once, however many choices"
        assert cached(client, STORY[: length // 2] + "else")[1] == (length // 2) // BLOCK * BLOCK
        for salt in ("one", "other"):
            assert cached(client, STORY, extra_body={"cache_salt": salt})[1] == 0
            assert cached(client, STORY, extra_body={"cache_salt": salt})[1] == expected
        assert cached(client, STORY, extra_body={"prompt_logprobs": 0})[1] == 0, "every token is judged"
        answer = client.completions.create(model="m", prompt=STORY, max_tokens=16).choices[0].text
        assert cached(client, STORY + answer + " And so on.")[1] > expected, "an answer is a prefix of the next turn"
        server.wait_for_gauges(
            lambda gauges: (
                gauges.total("headrace_cached_prompt_tokens_total") > 0
                and gauges.total("headrace_kv_blocks", state="cached") > 0
            ),
            "cached prompt tokens, and the blocks they are in",
        )
        server.wait_until_no_blocks_are_used()


def test_reuse_can_be_turned_off(tmp_path: Path) -> None:
    with scripted(tmp_path, "--no-enable-prefix-caching") as server:
        client = server.client()
        assert [cached(client, STORY)[1] for _ in range(2)] == [0, 0]
