"""Decides about the keys of a `config.json` that the reader does not use: ignore, ignore with a warning, or refuse.

Refused is only what may change the output while the weights look the same: names and shapes of all weights are compared
with the files in any case, so a setting that adds or resizes weights cannot go unnoticed.
"""

import re
import warnings
from collections.abc import Mapping
from typing import Any

from redline.errors import ModelError

# Say nothing about the arithmetic of one forward pass.
_WITHOUT_EFFECT = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "max_sequence_length",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "recall",  # what a model trained on a recall task was trained on
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    ]
)
# Prefixes and parts of names that say nothing about it either: bookkeeping of transformers and of tools, training
# (dropout, losses, initial weights), which kernel computes attention, and defaults for sampling.
_WITHOUT_EFFECT_PATTERN = re.compile(
    r"^_|^output_|^return_|^unsloth|^axolotl|^transformers\.|^(tokenizer|finetuning|prefix|task_specific|tf_)"
    r"|dropout|pdrop|drop_path|layerdrop|initializer|(^|_)init(_|$)|(^|_)loss(_|$)|_coef(f|ficient)?$"
    r"|_tokens?(_ids?)?$|(bad_words|suppress_tokens)_?ids|flash|_implementation|checkpointing|(^|_)grad(ient)?(_|$)|logits_to_keep$"
    r"|^(max|min)_(new_tokens|length|seq_len|seq_length|sequence_length)$|^(model_max_length|seq_length|seq_len)$"
    r"|^(do_sample|temperature|top_k|top_p|typical_p|num_beams|num_beam_groups|diversity_penalty|length_penalty"
    r"|repetition_penalty|encoder_no_repeat_ngram_size|no_repeat_ngram_size|early_stopping|num_return_sequences"
    r"|exponential_decay_length_penalty|remove_invalid_values|use_bfloat16|bf16|fp16|auto_map|torchscript)$"
)
# Are understood only as they usually stand.
_USUAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "quantization_config": (None, {}),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
}
# Other exporters' keys for what all families do; any other value is another model.
_ALIKE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hidden_activation", "activation_function"), ("silu", "swish", None)),
    **dict.fromkeys(("norm_type", "normalization_type"), ("rmsnorm", "rms_norm", "rms", "RMSNorm", None)),
    **dict.fromkeys(("is_causal", "causal", "use_rope", "use_rotary", "rms_norm", "use_rms_norm"), (True, None)),
    "position_embedding_type": ("rope", "rotary", None),
    "scale_attn_weights": (True, None),
}
_MOST_NAMED = 10
_QUERY_KEY_NORM = ("qk_norm", "use_qk_norm", "qk_layernorm", "use_query_key_norm")
# Words of a name that stand for arithmetic which the weights do not show.
_ARITHMETIC = re.compile(
    r"rope|rotary|yarn|(^|_)ntk|alibi|positional|(?<!max_)position_(bias|emb|enc|type)|norm(s|ed|alize|alization)?(_|$)"
    r"|scal(e|ed|ar|ing)|multiplier|factor|softcap|(^|_)(cap|clip|mup|mask|sink|sinks|pct|percent)(_|$)|clamp"
    r"|attn|attention|window|sliding|sparse|sparsity|residual|parallel_(block|mlp)|activation|(^|_)act(_|$)"
    r"|quant|(^|_)bits(_|$)|compress|logit|softmax|(^|_)causal$|temperature|theta|early_exit"
)
# Sizes, which the weights do show.
_SIZE = re.compile(r"(attn|attention)_head(s|_size|_dim)?$|(ffn|mlp|dim|size|width)_multiplier$")
# Other names for settings that are read: harmless where they say the same.
_SAME = {
    "layer_norm_eps": "rms_norm_eps",
    "layer_norm_epsilon": "rms_norm_eps",
    "norm_eps": "rms_norm_eps",
    "norm_epsilon": "rms_norm_eps",
    "rope_base": "rope_theta",
    "rotary_base": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "rotary_dim": "head_dim",
}
_NEUTRAL_AT_ONE = re.compile(r"scal(e|ing)|multiplier|factor|pct|percent|(^|_)ratio|temperature")
# Attention is scaled by the root of the head's size: no other number leaves it as it is.
_NEVER_NEUTRAL_NUMBER = re.compile(r"att(n|ention).*(scale|scaling|scalar|multiplier)")


def check_keys(document: Mapping[str, Any], read: frozenset[str], family: str, strict: bool, origin: str) -> None:
    """Raises for a key that would change the output, warns of those that cannot be judged; `strict` refuses these too.

    `read` are the keys that the reader uses.
    """
    unjudged: list[str] = []
    for key, value in document.items():
        if key in read or key in _WITHOUT_EFFECT:
            continue
        if strict and key not in _USUAL:
            raise ModelError(f"{origin!r} has the setting {_shown(key)}, which is not known.")
        if accepted := _USUAL.get(key) or _ALIKE.get(key):
            if value not in accepted:
                raise ModelError(f"{origin!r} sets {_shown(key)} to {_shown(value)}, which is not supported.")
        elif _is_harmless(key, value, document, family):
            continue
        elif _ARITHMETIC.search(key.lower()) and not _SIZE.search(key.lower()):
            raise ModelError(
                f"{origin!r} sets {_shown(key)} to {_shown(value)}, which is not known and may change the output: if "
                "it does not, remove it from the file."
            )
        else:
            unjudged.append(key)
    if unjudged:
        names = ", ".join(map(_shown, unjudged[:_MOST_NAMED]))
        names += f" and {len(unjudged) - _MOST_NAMED} more" if len(unjudged) > _MOST_NAMED else ""
        warnings.warn(f"{origin!r}: unknown settings are ignored: {names}.", stacklevel=2)


def _is_harmless(key: str, value: Any, document: Mapping[str, Any], family: str) -> bool:
    if _WITHOUT_EFFECT_PATTERN.search(key.lower()) or is_neutral(key, value):
        return True
    if isinstance(value, str) and value.lower() in _USUAL["hidden_act"]:
        return True
    if key in _SAME:
        rope = document.get("rope_parameters")
        known = {**document, **(rope if isinstance(rope, dict) else {})}
        return value == known.get(_SAME[key])
    return family == "qwen3" and key in _QUERY_KEY_NORM and value is True


def is_neutral(key: str, value: Any) -> bool:
    """Whether a feature that is not known is off: null, false, 0, empty, "none", or a factor of 1."""
    if value is None or value is False:
        return True
    if isinstance(value, (str, list, dict)):
        return not value or (isinstance(value, str) and value.lower() in ("none", "default", "full", "full_attention"))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or _NEVER_NEUTRAL_NUMBER.search(key.lower()):
        return False
    return value == (1 if _NEUTRAL_AT_ONE.search(key.lower()) else 0)


def _shown(value: Any) -> str:
    """A value in a sentence; a long one is cut off."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
