from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from headrace.model_files.gguf_metadata import GgufMetadata
from headrace.model_files.gguf_tokenizer import tokenizer_from_gguf

TEXTS = [
    "Explain the KV cache in one sentence.",
    "  1\n\n2. x=  3\t\tif x:\r\n\r\n    return 12345678 ",
    "naïve こんにちは 안녕하세요 Здравствуй 👩‍👩‍👧‍👦 e\u0301 İ ﬁ",
    "I'LL they've DON'T 'S it's",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|>",
    "".join(map(chr, range(32, 0x250))),
]


@pytest.mark.slow
def test_llama_3_1_from_gguf_fields_equals_its_own_tokenizer_json(llama3_tokenizer_directory: Path) -> None:
    document = json.loads((llama3_tokenizer_directory / "tokenizer.json").read_text())
    original = Tokenizer.from_str(json.dumps(document))
    added = {token["id"]: token["content"] for token in document["added_tokens"]}
    by_id = {index: token for token, index in document["model"]["vocab"].items()} | added
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [by_id[index] for index in range(len(by_id))],
        "tokenizer.ggml.token_type": [3 if index in added else 1 for index in range(len(by_id))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 128000,
        "tokenizer.ggml.eos_token_id": 128009,
    }
    made = Tokenizer.from_str(json.dumps(tokenizer_from_gguf(GgufMetadata(Path("m.gguf"), fields, ()))))
    words = [original.decode([index]) for index in range(1000, 128000, 97)]
    for text in [*TEXTS, *words]:
        assert made.encode(text).ids == original.encode(text).ids, text
    assert made.get_vocab() == original.get_vocab()
