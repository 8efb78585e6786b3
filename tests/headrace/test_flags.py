"""Flags come from the command line, the environment and a file, in that order, and mistakes are one line."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frontend.settings import FrontendSettings
from headrace.command_line import flag_table
from headrace.command_line.flags import (
    Flag,
    Parsed,
    UsageError,
    alternatives,
    cert_reqs,
    integer,
    json_object,
    number,
    parse_flags,
    port,
    positive,
    size,
    tokens,
)
from headrace.command_line.foreign_flags import ForeignFlag
from headrace.command_line.roles import frontend_values
from headrace.command_line.serve_settings import parse_groups, serve_settings


def parse(*arguments: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    return parse_flags(
        "serve",
        "",
        flag_table.SERVE,
        arguments,
        environment=environment or {},
        foreign=flag_table.FOREIGN,
        model_argument=True,
    ).values


def refused(*arguments: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as raised:
        parse(*arguments, environment=environment)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_only_what_was_given_is_returned() -> None:
    assert parse() == {}
    assert parse("m.gguf", "--port", "8123") == {"model": "m.gguf", "port": 8123}


@pytest.mark.parametrize("word", [["m.gguf"], ["--model", "m.gguf"], ["-m", "m.gguf"], ["m.gguf", "-m", "m.gguf"]])
def test_a_model_is_positional_or_a_flag(word: list[str]) -> None:
    assert parse(*word)["model"] == "m.gguf"


def test_two_different_models_are_refused() -> None:
    assert "two models" in refused("a", "--model", "b")


def test_the_command_line_wins_over_the_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text('port = 1\nhost = "file"\nfrontends = 3\n')
    given = parse(
        *("--config", str(config), "--port", "3"),
        environment={"HEADRACE_PORT": "2", "HEADRACE_HOST": "environment"},
    )
    assert given == {"port": 3, "host": "environment", "frontends": 3}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "served-model-name: [a, b]\nmax_model_len: 4k\nstrict-fields: true\n"),
        ("a.toml", 'served-model-name = ["a", "b"]\nmax_model_len = "4k"\nstrict-fields = true\n'),
        ("a.json", '{"served-model-name": ["a", "b"], "max_model_len": "4k", "strict-fields": true}'),
    ],
)
def test_a_file_may_be_yaml_toml_or_json(tmp_path: Path, name: str, text: str) -> None:
    config = tmp_path / name
    config.write_text(text)
    expected = {"served_model_name": ("a", "b"), "max_model_len": 4000, "strict_fields": True}
    assert parse("--config", str(config)) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prot: 1", "did you mean port"),
        ("port: many", "not a whole number"),
        ("- port", "mapping"),
        ("port: [", "server.yaml"),
        ("port: 99999", "65535"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(text)
    assert complaint in refused("--config", str(config))


def test_a_missing_file_is_named() -> None:
    assert "/no/such.yaml" in refused("--config", "/no/such.yaml")


def test_a_mistake_in_the_environment_names_the_variable() -> None:
    assert "HEADRACE_PORT" in refused(environment={"HEADRACE_PORT": "many"})


def test_an_unknown_flag_is_answered_with_the_nearest_one() -> None:
    assert "--served-model-name" in refused("--served-model-names", "x")
    assert "--help" in refused("--xyzzy")


def test_underscores_stand_for_dashes() -> None:
    assert parse("--max_model_len=4096") == {"max_model_len": 4096}


def test_flags_are_not_abbreviated() -> None:
    refused("--por", "1")


VLLM_FLAGS = [
    name
    for line in (Path(__file__).parent / "vllm_serve_flags.txt").read_text().splitlines()
    if not line.startswith("#")
    for name in line.split()
]
FOREIGN = flag_table.FOREIGN.flags


def parsed(*arguments: str) -> Parsed:
    return parse_flags(
        "serve", "", flag_table.SERVE, arguments, environment={}, foreign=flag_table.FOREIGN, model_argument=True
    )


def test_every_flag_of_vllm_serve_has_its_answer() -> None:
    ours = {spelling for flag in flag_table.SERVE for spelling in flag.spellings}
    assert len(VLLM_FLAGS) > 250
    assert [name for name in VLLM_FLAGS if f"--{name}" not in ours and f"--{name}" not in flag_table.FOREIGN] == []


@pytest.mark.parametrize("flag", FOREIGN, ids=lambda flag: flag.name)
def test_a_flag_of_others_is_taken_with_one_notice_or_becomes_ours_or_ends_with_a_line(flag: ForeignFlag) -> None:
    words = [f"--{flag.name}", *([] if flag.words == "none" else ["7x"])]
    if flag.becomes is not None:
        return  # below
    if flag.accepted:
        taken = parsed("m.gguf", *words, "--port", "1")
        assert taken.values == {"model": "m.gguf", "port": 1}
        assert len(taken.notices) == 1 and taken.notices[0].startswith(f"--{flag.name}: ")
    else:
        assert refused(*words).startswith(f"--{flag.name}: ")
    for value in flag.neutral:
        assert parsed(f"--{flag.name}", value).notices and parsed(f"--{flag.name}={value}").values == {}
    if flag.words == "none":
        off = f"--no-{flag.name}"
        assert refused(off).startswith(f"{off}: ") if flag.accepted else parsed(off).values == {}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--data-parallel-size 2", {"groups": "2"}),
        ("-dp=2", {"groups": "2"}),
        ("--api-server-count 4", {"frontends": 4}),
        ("--distributed-executor-backend mp", {"launcher": "local"}),
        ("--distributed-executor-backend=ray", {"launcher": "ray"}),
        ("--kv-cache-memory-bytes 1g", {"kv_cache_memory": 10**9}),
        ("--max-num-queued-reqs 7", {"max_queue_requests": 7}),
        ("--max_num_queued_tokens 7k", {"max_queue_tokens": 7000}),
        ("--shutdown-timeout 9", {"drain_timeout": 9.0}),
        ("--renderer-num-workers 3", {"tokenizer_threads": 3}),
        ("--sse-keep-alive-interval 9", {"ping_interval": 9.0}),
        ("--h11-max-incomplete-event-size 65536", {"max_header_bytes": 65536}),
        ("--disable-fastapi-docs", {"docs": "off"}),
        ("--enable-force-include-usage", {"force_include_usage": True}),
        ("--uvicorn-log-level trace", {"log_level": "debug"}),
        ('--allowed-origins ["https://a","https://b"]', {"cors_origins": ("https://a", "https://b")}),
        ("--generation-config vllm", {"generation_config": "none"}),
        ("--dtype half", {"dtype": "float16"}),
        ("-q int8 --kv-cache-dtype int8", {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("--quantization gguf", {"quantization": ""}),
        ("--enable-prefix-caching", {"prefix_caching": True}),
        ("--no-enable-prefix-caching", {"prefix_caching": False}),
        ("--long-prefill-token-threshold 1k", {"long_prefill_threshold": 1000}),
        ("--long-prefill-token-threshold 0", {"long_prefill_threshold": 0}),
    ],
)
def test_what_means_the_same_is_translated(words: str, expected: dict[str, Any]) -> None:
    assert parse(*words.split()) == expected


def test_every_translation_is_tried() -> None:
    tried = {"data-parallel-size", "api-server-count", "distributed-executor-backend", "kv-cache-memory-bytes",
             "max-num-queued-reqs", "max-num-queued-tokens", "shutdown-timeout", "sse-keep-alive-interval",
             "h11-max-incomplete-event-size", "disable-fastapi-docs", "enable-force-include-usage",
             "uvicorn-log-level", "allowed-origins", "renderer-num-workers"}  # fmt: skip
    assert {flag.name for flag in FOREIGN if flag.becomes is not None} == tried


@pytest.mark.parametrize(("word", "value"), [("1", True), ("no", False)])
def test_a_switch_that_is_on_can_be_turned_off_everywhere(tmp_path: Path, word: str, value: bool) -> None:
    assert parse(environment={"HEADRACE_ENABLE_PREFIX_CACHING": word}) == {"prefix_caching": value}
    config = tmp_path / "headrace.yaml"
    config.write_text(f"enable-prefix-caching: {str(value).lower()}\n")
    assert parsed("--config", str(config)).values == {"prefix_caching": value}
    for role in (flag_table.SCHEDULER, flag_table.FRONTEND):
        assert "prefix_caching" in {flag.key for flag in role}


def test_a_bad_value_of_anothers_flag_is_one_line() -> None:
    assert refused("--allowed-origins", "*").startswith("--allowed-origins: ")
    assert "whole number" in refused("--api-server-count", "many")
    refused("--data-parallel-size")
    assert "byte" in refused("--tokenizer", "/models/other")


def test_a_flag_of_others_takes_its_own_words_only() -> None:
    given = parsed("--use-tqdm-on-load", "m.gguf", "--max-log-len", "5", "--port", "1", "-O3")
    assert given.values == {"model": "m.gguf", "port": 1} and len(given.notices) == 3


def test_a_role_without_our_flag_says_whose_it_is() -> None:
    with pytest.raises(UsageError, match="headrace serve"):
        parse_flags("scheduler", "", flag_table.SCHEDULER, ["--data-parallel-size", "2"], environment={},
                    foreign=flag_table.FOREIGN)  # fmt: skip


def test_a_file_made_for_vllm_is_read_alike(tmp_path: Path) -> None:
    config = tmp_path / "vllm.yaml"
    config.write_text("port: 1\nenable-prefix-caching: true\ndata-parallel-size: 2\nenable_force_include_usage: true\n"
                      "allowed-origins: [a]\nenable-lora: false\n")  # fmt: skip
    given = parsed("--config", str(config))
    assert given.values == {
        "port": 1, "groups": "2", "prefix_caching": True, "force_include_usage": True, "cors_origins": ("a",)
    }  # fmt: skip
    assert len(given.notices) == 1
    config.write_text("enable-lora: true\n")
    assert "--enable-lora: " in refused("--config", str(config)) and "vllm.yaml" in refused("--config", str(config))


def test_keys_are_handed_on_as_digests_and_open_the_network(tmp_path: Path) -> None:
    byte = ("--tokenizer", "byte", "--engine", "scripted", "--launcher", "local")
    given = parse(*byte, "--api-key", "sk-a", "sk-b")
    settings = serve_settings(given, {})
    assert settings.host == "0.0.0.0" and settings.asks_for_keys
    values = frontend_values(settings.given)
    assert "api_key" not in values and "sk-a" not in json.dumps(values)
    assert values["api_key_digests"] == tuple(sha256(key).hexdigest() for key in (b"sk-a", b"sk-b"))
    assert serve_settings({**given, "host": "127.0.0.1"}, {}).host == "127.0.0.1"
    assert serve_settings(parse(*byte), {}).host == "127.0.0.1"
    assert parse(environment={"HEADRACE_API_KEY": "sk-a sk-b"}) == {"api_key": ("sk-a", "sk-b")}
    assert serve_settings(parse(*byte, "--api-key-file", "keys"), {}).given["api_key_file"] == str(
        Path("keys").absolute()
    )


@pytest.mark.parametrize("variable", ["HEADRACE_API_KEY", "HEADRACE_API_KEY_FILE"])
def test_a_key_that_is_set_and_empty_never_leaves_the_server_open(variable: str) -> None:
    for empty in ("", "  "):
        assert variable in refused(environment={variable: empty})


def test_certificates_and_alternatives_are_checked_before_anything_starts() -> None:
    for text, expected in (("0", 0), ("2", 2), ("optional", 1)):
        assert parse("--ssl-cert-reqs", text) == {"ssl_cert_reqs": expected}
    refused("--ssl-cert-reqs", "3")
    assert parse("--max-logprobs", "5") == {"max_logprobs": 5}
    assert "20" in refused("--max-logprobs", "-1") and "20" in refused("--max-logprobs", "21")


def test_every_flag_of_a_frontend_is_a_setting_of_it() -> None:
    samples = {
        port: "1",
        number: "1",
        positive: "3",
        size: "1",
        tokens: "1",
        json_object: "{}",
        alternatives: "1",
        cert_reqs: "1",
    }
    for flag in flag_table.FRONTEND:
        if flag.name in ("config", "log-level"):
            continue
        value = () if flag.switch else (flag.choices[:1] or (samples.get(flag.parse, "model" if flag.name == "tokenizer"
                                                             else "auto"),))  # fmt: skip
        words = [*(flag.negations or (f"--{flag.name}",)), *value]
        given = parse_flags("frontend", "", flag_table.FRONTEND, words, environment={}).values
        made = msgspec.convert({"model": "m", "scheduler": "s", **frontend_values(given)}, FrontendSettings)
        assert made != msgspec.convert({"model": "m", "scheduler": "s"}, FrontendSettings) or flag.choices or (
            flag.name in ("tokenizer", "default-chat-template-kwargs", "generation-config")), flag.name  # fmt: skip


def test_every_setting_of_a_frontend_has_a_flag_or_is_the_supervisors() -> None:
    flags = {flag.key for flag in flag_table.FRONTEND}
    spelled = {"served_model_names": "served_model_name", "api_key_digests": "api_key"}
    settings = {spelled.get(name, name) for name in FrontendSettings.__struct_fields__}
    assert settings - flags == {"fd", "lease"}


def test_llama_cpp_spellings_are_understood() -> None:
    given = parse("-m", "m.gguf", "-c", "4096", "-np", "8", "-ngl", "0", "--threads", "2")
    settings = serve_settings({**given, "launcher": "local"}, {})
    assert settings.given["max_model_len"] == 4096
    assert settings.given["max_num_seqs"] == 8
    assert settings.given["device"] == "cpu"
    assert settings.given["threads"] == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512MiB", 512 << 20), ("4GB", 4 * 10**9), ("1g", 10**9), ("1.5GiB", 3 << 29), ("1024", 1024), ("2 KiB", 2048)],
)
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "-1GiB", "0", "4XB", "1e400GB", "nanGB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        size(text)


def test_token_suffixes_are_those_of_vllm() -> None:
    assert (tokens("8k"), tokens("8K"), tokens("8")) == (8000, 8192, 8)


@pytest.mark.parametrize("text", ["0", "2:4", "x", "1:", ":"])
def test_groups_that_cannot_be_are_refused(text: str) -> None:
    if text == "1:":
        assert parse_groups(text) == 1
        return
    with pytest.raises(UsageError):
        parse_groups(text)


def test_one_number_of_groups_is_both_bounds() -> None:
    assert parse_groups("2") == parse_groups("2:2") == 2


def test_no_two_flags_of_a_command_share_a_spelling_or_a_key() -> None:
    for flags in (
        flag_table.SERVE,
        flag_table.FRONTEND,
        flag_table.SCHEDULER,
        flag_table.WORKERS,
        flag_table.CHAT,
    ):
        spellings = [spelling for flag in flags for spelling in flag.spellings]
        assert len(set(spellings)) == len(spellings)
        assert len({flag.key for flag in flags}) == len(flags)


def test_every_flag_of_a_role_alone_can_be_given_to_serve_or_is_about_being_alone() -> None:
    serve = {flag.key for flag in flag_table.SERVE}
    alone = {
        "scheduler",
        "name",
        "frontend_bind",
        "worker_bind",
        "insecure_sockets",
        "keys",
        "metrics_port",
        "metrics_host",
    }
    for flags in (flag_table.FRONTEND, flag_table.SCHEDULER, flag_table.WORKERS):
        assert {flag.key for flag in flags} - serve <= alone


def test_json_in_a_flag_is_checked() -> None:
    assert parse("--default-chat-template-kwargs", json.dumps({"a": 1})) == {"default_chat_template_kwargs": {"a": 1}}
    refused("--default-chat-template-kwargs", "[1]")
    refused("--default-chat-template-kwargs", "{")


def test_a_custom_flag_table_needs_no_other_code() -> None:
    flags = (Flag("number-of-things", "", integer),)
    assert parse_flags("x", "", flags, ["--number-of-things", "3"], environment={}).values == {"number_of_things": 3}


@pytest.mark.parametrize(
    "arguments",
    [("--tokenizer", "byte"), ("--engine-script", "x.jsonl")],
)
def test_flags_that_contradict_each_other_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        serve_settings({**parse(*arguments), "launcher": "local"}, {})


def test_paths_are_absolute_for_children_that_stand_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    settings = serve_settings({**parse("model.gguf", "--step-log", "steps.jsonl"), "launcher": "local"}, {})
    assert settings.model == str(tmp_path / "model.gguf")
    assert settings.given["step_log"] == str(tmp_path / "steps.jsonl")


def test_a_ray_address_in_the_environment_is_used_and_no_head_is_started() -> None:
    environment = {"RAY_ADDRESS": "10.0.0.1:6379"}
    byte = {"engine": "scripted", "tokenizer": "byte"}
    assert not serve_settings(byte, environment).private_ray
    assert serve_settings({**byte, "launcher": "local"}, environment).ray_address == ""
    assert serve_settings(byte, {}).private_ray
