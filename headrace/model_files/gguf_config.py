"""config.json and generation_config.json as a Hugging Face directory would have them, from GGUF metadata."""

from __future__ import annotations

from typing import Any

from headrace.model_files.artefact_error import ArtefactError
from headrace.model_files.gguf_metadata import GgufMetadata

_MODEL_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}

_INTEGERS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
}

_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

_EMBEDDING = "token_embd.weight"
_OUTPUT = "output.weight"


def config_from_gguf(gguf: GgufMetadata) -> dict[str, Any]:
    """config.json of the model in `gguf`.

    An architecture not named here gets its own name as `model_type`, so that the loader can refuse it by name.
    Llama 3's rope scaling is not in the metadata: such files carry the factors as the tensor `rope_freqs.weight`.
    """
    architecture = gguf.text("general.architecture")
    model_type, model_class = _MODEL_CLASSES.get(architecture, (architecture, ""))
    config: dict[str, Any] = {"model_type": model_type, "architectures": [model_class] if model_class else []}
    for key, name in _INTEGERS.items():
        full = f"{architecture}.{key}"
        if full in gguf.fields:
            config[name] = _layer_independent(gguf, full)
    config["max_position_embeddings"] = gguf.integer(f"{architecture}.context_length")
    config["vocab_size"] = _embedding_rows(gguf, architecture)
    config["tie_word_embeddings"] = _OUTPUT not in gguf.tensor_names()
    epsilon = f"{architecture}.attention.layer_norm_rms_epsilon"
    if epsilon in gguf.fields:
        config["rms_norm_eps"] = _shortest_float32(gguf.number(epsilon))
    config["rope_theta"] = _shortest_float32(gguf.number(f"{architecture}.rope.freq_base", 10000.0))
    config.update(_head_dimension(gguf, architecture, config))
    config.update(_rope_scaling(gguf, architecture))
    config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensor_names()
    config["hidden_act"] = "silu"
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        token = gguf.token_id(key)
        if token is not None:
            config[name] = token
    return config


def generation_config_from_gguf(gguf: GgufMetadata) -> dict[str, Any]:
    """generation_config.json: end tokens (eos and eot) and the sampling defaults the file may carry."""
    generation: dict[str, Any] = {}
    ends = [gguf.token_id(name) for name in ("eos", "eot")]
    end_ids = sorted({end for end in ends if end is not None})
    if end_ids:
        generation["eos_token_id"] = end_ids
    for key, name in _SAMPLING.items():
        value = gguf.fields.get(f"general.sampling.{key}")
        if isinstance(value, int | float):
            generation[name] = _shortest_float32(value) if isinstance(value, float) else value
    return generation


def _layer_independent(gguf: GgufMetadata, key: str) -> int:
    value = gguf.fields[key]
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ArtefactError(f"{gguf.path}: {key} differs between layers, which is not supported")
        value = value[0]
    if not isinstance(value, int):
        raise ArtefactError(f"{gguf.path}: metadata {key} should be an integer; it is {value!r}")
    return value


def _embedding_rows(gguf: GgufMetadata, architecture: str) -> int:
    for entry in gguf.tensors:
        if entry.name == _EMBEDDING and len(entry.shape) == 2:
            return entry.shape[0]
    return gguf.integer(f"{architecture}.vocab_size", len(gguf.strings("tokenizer.ggml.tokens")))


def _head_dimension(gguf: GgufMetadata, architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    if "head_dim" in config or not config.get("num_attention_heads"):
        return {}
    width = gguf.integer(f"{architecture}.embedding_length")
    return {"head_dim": width // int(config["num_attention_heads"])}


def _rope_scaling(gguf: GgufMetadata, architecture: str) -> dict[str, Any]:
    prefix = f"{architecture}.rope.scaling"
    older = f"{architecture}.rope.scale_linear"
    kind = gguf.text(f"{prefix}.type", "linear" if older in gguf.fields else "none")
    factor = gguf.number(f"{prefix}.factor", gguf.number(older, 1.0))
    if kind == "none" or factor == 1.0:
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _shortest_float32(factor)}
    if f"{prefix}.original_context_length" in gguf.fields:
        scaling["original_max_position_embeddings"] = gguf.integer(f"{prefix}.original_context_length")
    return {"rope_scaling": scaling}


def _shortest_float32(value: float) -> float:
    """The decimal a person wrote before it was stored in 32 bits: 1e-5, not 9.999999747378752e-06.

    Computed in float32, both give the same number.
    """
    import numpy as np

    return float(str(np.float32(value)))
