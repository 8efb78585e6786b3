"""What /tokenize and /render count is what the same request costs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frontend.harness import CHAT, COMPLETIONS, Bench, chat, completion

TOKENIZE, DETOKENIZE, RENDER = "/v1/tokenize", "/v1/detokenize", "/v1/chat/completions/render"

CHATS: list[dict[str, Any]] = [
    chat("hi"),
    chat("naïve 🦙 <|im_end|> text"),
    {**chat(), "messages": [{"role": "system", "content": "s"},
                            {"role": "developer", "content": [{"type": "text", "text": "d"}]},
                            {"role": "user", "content": "u", "name": "x"}]},
    chat("x", add_generation_prompt=False),
    {**chat(continue_final_message=True, add_generation_prompt=False),
     "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    chat("x", temperature=0, max_tokens=5, stream=True, stream_options={"include_usage": True}, unknown_thing=1),
]  # fmt: skip


@pytest.mark.parametrize("body", CHATS)
async def test_render_tokenize_and_usage_count_alike(here: Bench, body: dict[str, Any]) -> None:
    tokenized = (await here.post(TOKENIZE, body)).json()
    rendered = (await here.post(RENDER, body)).json()
    plain = {key: value for key, value in body.items() if not key.startswith("stream")}
    usage = (await here.post(CHAT, {**plain, "max_tokens": 1})).json()["usage"]
    assert tokenized["count"] == rendered["count"] == usage["prompt_tokens"] == len(tokenized["tokens"])
    assert tokenized["tokens"] == rendered["tokens"] and tokenized["max_model_len"] == rendered["max_model_len"] == 1000
    assert len(tokenized["token_strs"]) == len(rendered["token_texts"]) == rendered["count"]
    assert here.scheduler.submits[-1].tokens[::4] == bytes(token % 256 for token in tokenized["tokens"])
    if rendered["prompt"].isascii():
        assert "".join(rendered["token_texts"]) == rendered["prompt"]


async def test_a_raw_prompt_is_counted_as_completions_count_it(here: Bench) -> None:
    for prompt in ("hello", "naïve 🦙", [104, 105]):
        tokenized = (await here.post(TOKENIZE, {"prompt": prompt})).json()
        usage = (await here.post(COMPLETIONS, completion(prompt))).json()["usage"]
        assert tokenized["count"] == usage["prompt_tokens"]
    assert (await here.post("/tokenize", {"prompt": "hi"})).json() == {
        "count": 2, "max_model_len": 1000, "tokens": [104, 105], "token_strs": ["h", "i"],
    }  # fmt: skip
    assert (await here.post(TOKENIZE, {"prompt": "hi", "return_token_strs": False})).json()["token_strs"] is None


async def test_render_names_its_template(here: Bench) -> None:
    rendered = (await here.post("/chat/completions/render", chat("hi"))).json()
    assert rendered["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered["template"]["name"] == "default" and "im_start" in rendered["template"]["source"]
    assert rendered["token_texts"][:6] == ["<|im_start|>", "u", "s", "e", "r", "\n"]
    assert rendered["model"] == "llama-8b"


async def test_ids_become_text_again(here: Bench) -> None:
    ids = (await here.post(TOKENIZE, {"prompt": "naïve 🦙"})).json()["tokens"]
    assert (await here.post(DETOKENIZE, {"tokens": ids})).json() == {"prompt": "naïve 🦙"}
    special = {"tokens": [257, 104, 258]}
    assert (await here.post("/detokenize", special)).json() == {"prompt": "<|im_start|>h<|im_end|>"}
    assert (await here.post(DETOKENIZE, {**special, "skip_special_tokens": True})).json() == {"prompt": "h"}
    assert (await here.post(DETOKENIZE, {"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        (TOKENIZE, {}, 400, "missing_required_parameter", "prompt"),
        (TOKENIZE, {"prompt": "a", "messages": []}, 400, "invalid_value", "prompt"),
        (TOKENIZE, {"prompt": ""}, 400, "invalid_value", "prompt"),
        (TOKENIZE, {"prompt": 3}, 400, "invalid_type", "prompt"),
        (TOKENIZE, {"prompt": "a", "model": "nobody"}, 404, "model_not_found", "model"),
        (TOKENIZE, {"messages": [{"role": "wizard"}]}, 400, "invalid_value", "messages[0].role"),
        (TOKENIZE, {"messages": "x"}, 400, "invalid_type", "messages"),
        (TOKENIZE, {"promtp": "x"}, 400, "unknown_parameter", "promtp"),
        (RENDER, {"prompt": "x"}, 400, "missing_required_parameter", "messages"),
        (DETOKENIZE, {}, 400, "missing_required_parameter", "tokens"),
        (DETOKENIZE, {"tokens": "x"}, 400, "invalid_type", "tokens"),
        (DETOKENIZE, {"tokens": [1, -1]}, 400, "invalid_value", "tokens[1]"),
        (DETOKENIZE, {"tokens": [259]}, 400, "invalid_value", "tokens[0]"),
        (DETOKENIZE, {"tokens": [2**40]}, 400, "invalid_value", "tokens[0]"),
        (DETOKENIZE, {"tokens": [1.5]}, 400, "invalid_type", "tokens[0]"),
    ],
)
async def test_bad_bodies_name_the_field(
    here: Bench, path: str, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    response = await here.post(path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error


async def test_a_long_prompt_can_be_counted_beyond_the_context(here: Bench) -> None:
    assert (await here.post(TOKENIZE, {"prompt": "x" * 200_000})).json()["count"] == 200_000


async def test_version_and_load(here: Bench) -> None:
    version = (await here.client.get("/version")).json()
    assert version["version"].startswith("0.") and version["server"] == "headrace"
    load = (await here.client.get("/load")).json()
    assert load["server_load"] == 0 and load["groups"] == []
