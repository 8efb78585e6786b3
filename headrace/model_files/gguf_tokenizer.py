"""tokenizer.json from GGUF metadata, in the form the `tokenizers` library reads.

The split patterns belong to the vocabularies of public models; `tokenizer.ggml.pre` names the one in use. They
follow llama.cpp's reading of that name, because that is what the merges were learned with. `tokenizer.ggml.pre`
values not listed are refused by name: a wrong split gives plausible, wrong ids.
"""

from __future__ import annotations

from typing import Any

from headrace.model_files.artefact_error import ArtefactError
from headrace.model_files.gguf_metadata import GgufMetadata

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2_NAMES = frozenset({"", "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"})
"""Split by GPT-2's own pattern, which `ByteLevel` has built in."""

_DIGITS_NAMES = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""GPT-2's pattern after every digit has been cut off on its own."""

_PATTERNS = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "kormo", "f2llmv2"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
}

_WHOLE_WORDS_FIRST = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
)
"""A piece that is a vocabulary entry is taken whole, whatever the merges say."""

_ADDS_BOS = _WHOLE_WORDS_FIRST - {"tekken"}
"""Vocabularies whose models were trained with BOS, for files that carry no flag."""


def tokenizer_from_gguf(gguf: GgufMetadata) -> dict[str, Any]:
    """The contents of tokenizer.json. Raises ArtefactError naming a tokenizer type that is not supported."""
    kind = gguf.text("tokenizer.ggml.model")
    if kind == "gpt2":
        document = _byte_level(gguf)
    elif kind == "llama":
        document = _sentencepiece(gguf)
    else:
        raise ArtefactError(f"{gguf.path}: tokenizer type {kind!r} is not supported in GGUF files; gpt2 and llama are")
    document["post_processor"] = _post_processor(gguf)
    return document


def tokenizer_config_from_gguf(gguf: GgufMetadata) -> dict[str, Any]:
    """The contents of tokenizer_config.json: the named special tokens and whether BOS and EOS are added."""
    tokens = gguf.strings("tokenizer.ggml.tokens")
    config: dict[str, Any] = {"add_bos_token": _adds_bos(gguf), "add_eos_token": _adds_eos(gguf)}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = gguf.token_id(key)
        if index is not None:
            config[f"{name}_token"] = tokens[index]
    return config


def chat_templates_from_gguf(gguf: GgufMetadata) -> dict[str, str]:
    """The default chat template and the named ones."""
    templates = {}
    if isinstance(gguf.fields.get("tokenizer.chat_template"), str):
        templates["default"] = gguf.text("tokenizer.chat_template")
    for name in gguf.strings("tokenizer.chat_templates", []):
        key = f"tokenizer.chat_template.{name}"
        if isinstance(gguf.fields.get(key), str):
            templates[name] = gguf.text(key)
    return templates


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free code point from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(printable))
    return letters


def _byte_level(gguf: GgufMetadata) -> dict[str, Any]:
    pre = gguf.text("tokenizer.ggml.pre", "")
    tokens = gguf.strings("tokenizer.ggml.tokens")
    added = _added_tokens(gguf, tokens)
    literal = {entry["id"] for entry in added}
    letters = byte_alphabet()
    alphabet = frozenset(letters.values())
    vocab = {
        token
        if index in literal or alphabet.issuperset(token)
        else "".join(letters[byte] for byte in token.encode()): index
        for index, token in enumerate(tokens)
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre in _WHOLE_WORDS_FIRST,
        "vocab": vocab,
        "merges": _merges(gguf, vocab),
    }
    return _document(added, model, pre_tokenizer=_split(gguf, pre), decoder=_byte_level_step(use_regex=True))


def _split(gguf: GgufMetadata, pre: str) -> dict[str, Any]:
    if pre in _GPT2_NAMES:
        return _byte_level_step(use_regex=True)
    if pre in _DIGITS_NAMES:
        steps = [{"type": "Digits", "individual_digits": True}, _byte_level_step(use_regex=True)]
    elif pre in _PATTERNS:
        split = {"type": "Split", "pattern": {"Regex": _PATTERNS[pre]}, "behavior": "Isolated", "invert": False}
        steps = [split, _byte_level_step(use_regex=False)]
    else:
        raise ArtefactError(
            f"{gguf.path}: pre-tokenizer {pre!r} is not known; a Hugging Face directory of the model works"
        )
    return {"type": "Sequence", "pretokenizers": steps}


def _byte_level_step(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sentencepiece(gguf: GgufMetadata) -> dict[str, Any]:
    """SentencePiece BPE with byte fallback, as Llama 2 and its relatives use it."""
    tokens = gguf.strings("tokenizer.ggml.tokens")
    added = _added_tokens(gguf, tokens)
    vocab = {token: index for index, token in enumerate(tokens)}
    prefix_space = gguf.fields.get("tokenizer.ggml.add_space_prefix", True) is not False
    unknown = gguf.token_id("unknown")
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else tokens[unknown],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": _merges(gguf, vocab) if "tokenizer.ggml.merges" in gguf.fields else _scored_merges(gguf, vocab),
    }
    metaspace = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first" if prefix_space else "never",
        "split": False,
    }
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _document(added, model, pre_tokenizer=metaspace, decoder={"type": "Sequence", "decoders": steps})


def _scored_merges(gguf: GgufMetadata, vocab: dict[str, int]) -> list[list[str]]:
    """Merges that reproduce SentencePiece's order: the pair whose joined piece scores highest merges first."""
    scores = gguf.fields.get("tokenizer.ggml.scores")
    count = len(gguf.strings("tokenizer.ggml.tokens"))
    if not isinstance(scores, list) or len(scores) != count or isinstance(scores[0], str):
        raise ArtefactError(f"{gguf.path}: a llama tokenizer needs merges or one score per token; it has neither")
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocab.items():
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        ranked.extend((scores[index], len(left), len(right), left, right) for left, right in known)
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [[left, right] for *_, left, right in ranked]


def _merges(gguf: GgufMetadata, vocab: dict[str, int]) -> list[list[str]]:
    merges = []
    for merge in gguf.strings("tokenizer.ggml.merges"):
        left, separator, right = merge.partition(" ")
        if not separator or left not in vocab or right not in vocab or left + right not in vocab:
            raise ArtefactError(f"{gguf.path}: the merge {merge[:40]!r} does not join two tokens into a third")
        merges.append([left, right])
    return merges


def _added_tokens(gguf: GgufMetadata, tokens: list[str]) -> list[dict[str, Any]]:
    """Control tokens and those with a role are special; user-defined ones are matched whole but are text."""
    if not tokens:
        raise ArtefactError(f"{gguf.path}: the vocabulary is empty")
    types = gguf.fields.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list) or len(types) not in (0, len(tokens)):
        raise ArtefactError(f"{gguf.path}: tokenizer.ggml.token_type should have one entry per token")
    special = {gguf.token_id(name) for name in ("bos", "eos", "unknown", "padding")}
    special.update(index for index, kind in enumerate(types) if kind == _CONTROL)
    user_defined = {index for index, kind in enumerate(types) if kind == _USER_DEFINED}
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": index in special,
        }
        for index, token in enumerate(tokens)
        if token and (index in special or index in user_defined)
    ]


def _document(
    added: list[dict[str, Any]], model: dict[str, Any], *, pre_tokenizer: dict[str, Any], decoder: dict[str, Any]
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _adds_bos(gguf: GgufMetadata) -> bool:
    default = gguf.fields.get("tokenizer.ggml.model") == "llama" or gguf.fields.get("tokenizer.ggml.pre") in _ADDS_BOS
    return gguf.fields.get("tokenizer.ggml.add_bos_token", default) is True


def _adds_eos(gguf: GgufMetadata) -> bool:
    return gguf.fields.get("tokenizer.ggml.add_eos_token", False) is True


def _post_processor(gguf: GgufMetadata) -> dict[str, Any] | None:
    config = tokenizer_config_from_gguf(gguf)
    begin = [config["bos_token"]] if config["add_bos_token"] and "bos_token" in config else []
    end = [config["eos_token"]] if config["add_eos_token"] and "eos_token" in config else []
    if not begin and not end:
        return None
    ids = {"bos_token": "bos", "eos_token": "eos"}
    special = {
        config[name]: {
            "id": config[name],
            "ids": [gguf.integer(f"tokenizer.ggml.{key}_token_id")],
            "tokens": [config[name]],
        }
        for name, key in ids.items()
        if name in config and config[name] in begin + end
    }

    def template(*sequences: tuple[str, int]) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = []
        for name, type_id in sequences:
            steps += [{"SpecialToken": {"id": token, "type_id": type_id}} for token in begin]
            steps.append({"Sequence": {"id": name, "type_id": type_id}})
            steps += [{"SpecialToken": {"id": token, "type_id": type_id}} for token in end]
        return steps

    return {
        "type": "TemplateProcessing",
        "single": template(("A", 0)),
        "pair": template(("A", 0), ("B", 1)),
        "special_tokens": special,
    }
