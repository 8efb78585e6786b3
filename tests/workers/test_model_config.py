"""config.json is understood in both spellings, and what is not supported is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from workers.model.config import ModelConfig
from workers.model.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_sizes_that_config_leaves_out_follow_from_the_others() -> None:
    config = ModelConfig.from_dict({key: value for key, value in LLAMA.items() if key != "num_key_value_heads"})
    assert (config.num_kv_heads, config.head_dim, config.group_size, config.tied_embeddings) == (4, 16, 1, False)
    assert config.kv_bytes_per_token(2) == 2 * 2 * 4 * 16 * 2


def test_old_and_new_spelling_of_rope_mean_the_same() -> None:
    old = ModelConfig.from_dict({**LLAMA, "rope_theta": 500000.0, "rope_scaling": LLAMA3})
    new = ModelConfig.from_dict({**LLAMA, "rope_parameters": {**LLAMA3, "rope_theta": 500000}})
    assert old == new
    assert (new.rope.kind, new.rope.theta, new.rope.original_context) == ("llama3", 500000.0, 8192)


def test_the_oldest_spelling_of_linear_scaling_is_read() -> None:
    config = ModelConfig.from_dict({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}})
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 2.0, 10000.0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "not supported: GPT2LMHeadModel; supported: LlamaForCausalLM"),
        ({"architectures": [], "model_type": "mamba"}, "not supported: mamba; supported: LlamaForCausalLM"),
        ({"architectures": []}, "not supported: none named in config.json"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"vocab_size": "many"}, "vocab_size is 'many', not a value of type int"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn; supported: default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "config.json has no factor"),
        ({"num_key_value_heads": 3}, "4 heads do not divide over 3 KV heads"),
        ({"hidden_act": "gelu"}, "activation not supported: gelu"),
        ({"num_hidden_layers": 0}, "a size is less than 1"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_dict({**LLAMA, **changes})
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
