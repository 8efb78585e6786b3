"""A tokenizer whose ids are bytes, for engines that have no model behind them.

Ids 0 … 255 are the bytes; the control tokens follow. Any text costs as many tokens as it has UTF-8 bytes, so a
test can say what it wants on the wire down to half a character.
"""

from __future__ import annotations

from typing import Any

from headrace.model_files.gguf_tokenizer import byte_alphabet

BYTE_MODEL_NAME = "byte"
BYTE_CONTEXT = 32_768

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

BYTE_VOCABULARY_SIZE = 256 + len(_CONTROL_TOKENS)


def byte_tokenizer() -> dict[str, Any]:
    """The contents of tokenizer.json."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {letter: byte for byte, letter in byte_alphabet().items()}
    vocab |= {token: 256 + index for index, token in enumerate(_CONTROL_TOKENS)}
    added = [
        {
            "id": vocab[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in _CONTROL_TOKENS
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def byte_tokenizer_config() -> dict[str, Any]:
    """The contents of tokenizer_config.json."""
    begin, _, end = _CONTROL_TOKENS
    return {"bos_token": begin, "eos_token": end, "pad_token": begin, "add_bos_token": False, "add_eos_token": False}


def byte_config() -> dict[str, Any]:
    """The contents of config.json: what a scheduler and a frontend need; there are no weights."""
    return {
        "model_type": BYTE_MODEL_NAME,
        "vocab_size": BYTE_VOCABULARY_SIZE,
        "max_position_embeddings": BYTE_CONTEXT,
        "eos_token_id": BYTE_VOCABULARY_SIZE - 1,
    }
