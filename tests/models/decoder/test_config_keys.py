"""Keys of a config.json without effect are ignored, what would change the output is refused, the rest is named."""

import json
import re
import warnings
from typing import Any

import pytest

from redline.errors import ModelError
from redline.models.decoder.hugging_face import read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
}
KNOWN = {
    "attention_dropout": 0.1,
    "head_dim": None,
    "is_llama_config": True,
    "layer_types": ["full_attention"] * 3,
    "max_sequence_length": 2048,
    "mlp_bias": False,
    "pretraining_tp": 2,
    "quantization_config": None,
    "rope_interleaved": False,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "unsloth_fixed": True,
    "use_mrope": False,
}
HARMLESS = {
    "_attn_implementation_autoset": True,
    "_commit_hash": "0123abc",
    "act_fn": "silu",
    "activation_function": "silu",
    "attention_backend": "flash",
    "attention_function": "sdpa",
    "attention_impl": "flash",
    "attention_probs_dropout_prob": 0.1,
    "attention_softmax_in_fp32": True,
    "attn_implementation": "flash_attention_2",
    "attn_method": "eager",
    "auto_map": {"AutoConfig": "configuration_x.XConfig"},
    "context_window": 160,
    "decoder_sparse_step": 1,
    "embd_pdrop": 0.1,
    "embedding_multiplier": 1.0,
    "final_logit_softcapping": None,
    "gradient_checkpointing": True,
    "init_std": 0.02,
    "is_causal": True,
    "layer_norm_eps": 1e-6,
    "logits_scaling": 1,
    "mask_token_id": 4,
    "masked_softmax_fusion": True,
    "max_length": 20,
    "no_rope_layers": [1, 1, 1],
    "normalization": "RMSNorm",
    "num_experts": 0,
    "num_loops": 1,
    "output_router_logits": False,
    "partial_rotary_factor": 1.0,
    "position_embedding_type": "rope",
    "position_encoding": "rope",
    "pruned_heads": {},
    "residual_in_fp32": True,
    "rms_norm_type": "rms",
    "rmsnorm_eps": 1e-6,
    "rope": True,
    "rope_freq_base": 1e4,
    "rotary": True,
    "rotary_emb_base": 1e4,
    "router_aux_loss_coef": 0.001,
    "softmax_in_fp32": True,
    "temperature": 0.7,
    "tie_encoder_decoder": False,
    "tokenizer_class": "LlamaTokenizer",
    "top_k": 50,
    "torchscript": False,
    "transformers.js_config": {"dtype": "q4"},
    "unsloth_training": {"rank": 16},
    "use_flash_attn": True,
    "use_parallel_residual": False,
    "use_qk_norm": False,
    "z_loss": 1e-4,
}
CHANGING = {
    "_attn_scale": 2.0,
    "activation_function": "gelu",
    "alibi": True,
    "attention_function": "linear",
    "attention_multiplier": 1.0,
    "attention_sink_tokens": 4,
    "attn_logit_softcapping": 50.0,
    "context_window": 80,
    "embedding_coefficient": 12.0,
    "embedding_multiplier": 12.0,
    "final_layernorm": False,
    "flash_scale": 3.0,
    "hidden_act": "gelu",
    "interleaved": True,
    "is_causal": False,
    "layer_norm_eps": 1e-5,
    "logits_scaling": 8.0,
    "mlp_bias": True,
    "mlp_gate": "sigmoid",
    "no_rope_layers": [1, 0, 1],
    "normalization": "layernorm",
    "num_loops": 4,
    "num_sink_tokens": 4,
    "output_multiplier": 2.0,
    "output_multiplier_scale": 0.577,
    "output_scale": 4.0,
    "partial_rotary_factor": 0.5,
    "position_embedding_type": "alibi",
    "quantization_config": {"bits": 4},
    "query_pre_attn_scalar": 256,
    "residual_coef": 0.5,
    "residual_multiplier": 0.22,
    "rmsnorm_eps": 1e-5,
    "rope_init_theta": 5e5,
    "rope_local_base_freq": 1e4,
    "rotary_emb_base": 5e5,
    "scale_depth": 1.4,
    "swiglu_limit": 7.0,
    "tie_layers": True,
    "use_mrope": True,
    "use_parallel_residual": True,
    "use_qk_norm": True,
}


def reading(more: dict[str, Any], strict: bool = False) -> Any:
    return read_config(LLAMA | more, "config.json", strict)


def test_known_keys_without_effect_change_nothing() -> None:
    assert reading(KNOWN) == reading(KNOWN, strict=True) == reading({})


@pytest.mark.parametrize("key", HARMLESS)
def test_harmless_keys_are_ignored_unless_strict(key: str) -> None:
    with warnings.catch_warnings(action="error"):
        assert reading({key: HARMLESS[key]}) == reading({})
    if key != "tie_encoder_decoder":
        with pytest.raises(ModelError, match=f"the unknown setting '{key}'"):
            reading({key: HARMLESS[key]}, strict=True)


@pytest.mark.parametrize("key", CHANGING)
def test_keys_that_change_the_output_are_refused_by_name_and_value(key: str) -> None:
    with pytest.raises(ModelError, match=f"sets (the unknown key )?'{key}' to ") as error:
        reading({key: CHANGING[key]})
    assert str(error.value).endswith(".")


def test_unknown_keys_are_named_in_one_warning() -> None:
    with pytest.warns(UserWarning, match="unknown settings are ignored: 'attention_head_dim', 'trained_by'") as found:
        assert reading({"attention_head_dim": 8, "trained_by": "us"}) == reading({})
    assert len(found) == 1


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_configs_of_transformers_are_read_without_warnings(family: str) -> None:
    import transformers

    document = json.loads(json.dumps(getattr(transformers, f"{family}Config")().to_dict()))
    with warnings.catch_warnings(action="error"):
        assert read_config(document, "config.json").layers == 32
        read_config(document, "config.json", strict=True)


def test_a_window_that_hides_nothing() -> None:
    for more in ({"sliding_window": 8, "use_sliding_window": False}, {"sliding_window": 160}, {"sliding_window": None}):
        assert reading(more) == reading({})
    without = {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8}
    assert reading(without | {"max_window_layers": 1}).windows == reading(without).windows
    mistral = {"model_type": "mistral", "sliding_window": 8, "layer_types": ["sliding_attention"] * 3}
    assert reading(mistral).windows == (8, 8, 8)
    with pytest.raises(ModelError, match="'layer_types' that contradict its 'sliding_window'"):
        reading(mistral | {"layer_types": ["full_attention"] * 3})


def test_positions_with_neutral_settings() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "attention_factor": None}
    assert reading({"rope_parameters": rope}) == reading({})
    with pytest.raises(ModelError, match="the rope setting 'partial_rotary_factor'"):
        reading({"rope_parameters": rope}, strict=True)


QWEN_WINDOW = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
DEFAULT_CONTEXTS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rope_scaling": "yarn"}, "'rope_scaling' is 'yarn', not null or an object"),
        ({"rope_parameters": [1]}, "'rope_parameters' is [1], not null or an object"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope type ['yarn'] (supported: default, linear, llama3)"),
        ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "'factor' is None, not a finite number"),
        ({"rms_norm_eps": None}, "'rms_norm_eps' is None, not a finite number"),
        (QWEN_WINDOW | {"max_window_layers": None}, "'max_window_layers' is None, not an integer"),
        ({"max_position_embeddings": None}, "'max_position_embeddings' is None, not an integer"),
        ({"layer_types": 5}, "'layer_types' is 5, not a list of full_attention and sliding_attention"),
        ({"layer_types": "full_attention"}, "'layer_types' is 'full_attention', not a list"),
        ({"layer_types": ["chunked_attention"] * 3}, "type 'chunked_attention' (supported: full_attention, sliding_"),
        (
            {"model_type": "mistral", "layer_types": [["a"]] * 3},
            "unsupported layer type ['a'] (supported: full_attention, sliding_attention)",
        ),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3}, "'layer_types', but no sliding window"),
    ],
    ids=str,
)
def test_a_setting_of_the_wrong_kind_is_named_with_its_value(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        reading(more)


@pytest.mark.parametrize("family", DEFAULT_CONTEXTS)
def test_a_context_that_is_left_out_is_that_of_transformers(family: str) -> None:
    document = LLAMA | {"model_type": family}
    del document["max_position_embeddings"]
    assert read_config(document, "config.json").context == DEFAULT_CONTEXTS[family]
