"""Checks the keys of a `config.json` that the reader does not use: ignores them, warns, or raises.

Only keys that may change the output without changing the weights raise. Settings that add or resize weights need
no check here, because names and shapes of all weights are compared with the files.
"""

import re
import warnings
from collections.abc import Mapping
from typing import Any

from redline.errors import ModelError
from redline.files.untrusted import shorten

# Keys without effect on a forward pass. `recall` holds the settings of Redline's recall task.
_WITHOUT_EFFECT = frozenset(
    key
    for keys in (
        "_name_or_path architectures attention_dropout bos_token_id chunk_size_feed_forward dtype",
        "eos_token_id id2label initializer_range is_decoder is_encoder_decoder is_llama_config label2id",
        "max_sequence_length model_type output_attentions output_hidden_states pad_token_id pretraining_tp",
        "problem_type recall return_dict torch_dtype transformers_version unk_token_id unsloth_fixed",
        "unsloth_version use_cache",
    )
    for key in keys.split()
)
# Patterns of further names without effect on the logits, although some match `_ARITHMETIC`: settings of training
# (dropout, losses, initial weights), kernel or dtype choice, token ids, outputs other than logits, and sampling
# defaults.
_WITHOUT_EFFECT_NAMES = re.compile(
    r"dropout|pdrop|drop_path|layerdrop|(^|_)(loss|aux)(_|$)|(^|_)grad(ient)?(_|$)|checkpointing"
    r"|(^|_)initializer(_|$)|(^|_)init_(std|range|method|device)$|(^|_)(bos|eos|pad|unk|sep|cls|mask|special)_tokens?$"
    r"|_implementation(_internal|_autoset)?$|_in_(fp32|float32)$|_fusion$|^(use_)?fused_"
    r"|^_?(use_|enable_)?flash(_?(attn|attention))?(_?[23])?(_(enabled|triton|rotary|norm|mlp))*$"
    r"|_token_(ids?|index)$|^(bad_words_ids|(begin_)?suppress_tokens|(num_)?logits_to_keep)$"
    r"|^output_(attentions|hidden_states|router_logits|scores)$|^return_dict|^use_return_dict$"
    r"|^(max|min)_(new_tokens|length|seq_len|seq_length|sequence_length)$|^(model_max_length|seq_length|seq_len)$"
    r"|^(do_sample|temperature|top_k|top_p|min_p|typical_p|num_beams|num_beam_groups|diversity_penalty|length_penalty"
    r"|repetition_penalty|encoder_no_repeat_ngram_size|no_repeat_ngram_size|early_stopping|num_return_sequences"
    r"|exponential_decay_length_penalty|remove_invalid_values|use_bfloat16|bf16|fp16|auto_map|torchscript)$"
)
# Bookkeeping keys of transformers and other tools, unless they match `_ARITHMETIC`.
_BOOKKEEPING = re.compile(
    r"^_|^(unsloth|axolotl|tokenizer)|^transformers\.|^(finetuning_task|prefix|task_specific_params)$|^tf_legacy_"
)
# The supported values of keys that the four supported families (Llama, Mistral, Qwen2 and Qwen3) use.
_USUAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "quantization_config": (None, {}),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
}
# Keys with which other exporters describe properties that all four families share, and the values that describe these
# families. Any other value means another architecture. Strings are compared in lower case, lists entry by entry.
_ALIKE: dict[str, tuple[Any, ...]] = {
    key: (*values, None)
    for keys, values in (
        ("hidden_activation activation_function", ("silu", "swish")),
        (
            "norm_type normalization_type rms_norm_type normalization norm layer_norm_type",
            ("rmsnorm", "rms_norm", "rms"),
        ),
        (
            "is_causal causal rope use_rope rotary use_rotary use_rotary_embeddings rms_norm use_rms_norm"
            " final_norm final_layernorm final_layer_norm use_final_norm scale_attn_weights gated_mlp use_gated_mlp"
            " swiglu use_swiglu",
            (True,),
        ),
        (
            "position_embedding_type position_embedding position_encoding position_encoding_type positional_encoding"
            " positional_embedding",
            ("rope", "rotary"),
        ),
        (
            "attn_impl attention_impl attn_backend attention_backend attn_function attention_function attn_method"
            " attention_method",
            ("eager", "sdpa", "flash", "flash_attn", "flash_attention", "flash_attention_2", "flash_attention_3")
            + ("flex_attention", "xformers", "triton", "torch", "math"),
        ),
        ("no_rope_layers", (1,)),  # 1 means that the layer has rotary positions
        ("decoder_sparse_step", (1, 0)),
    )
    for key in keys.split()
}
_MOST_NAMED = 10
_QUERY_KEY_NORM = ("qk_norm", "use_qk_norm", "qk_layernorm", "use_query_key_norm")
# Parts of names of settings that may change the computation without changing the names or shapes of the weights.
_ARITHMETIC = re.compile(
    r"rope|rotary|yarn|(^|_)ntk|alibi|positional|(?<!max_)position_(bias|emb|enc|type)|interleav|theta|base_freq|freq_base"
    r"|norm(s|ed|alize|alization)?(_|$)|scal(e|ed|ar|ing)|multiplier|factor|coef|soft_?cap|clamp|sink|glu(_|$)"
    r"|(^|_)(cap|clip|clipping|limit|mup|mask|pct|percent|gat(e|es|ed|ing))(_|$)"
    r"|attn|attention|window|sliding|sparse|sparsity|residual|parallel_(block|mlp)|activation|(^|_)act(_|$)"
    r"|quant|(^|_)bits(_|$)|compress|logit|softmax|(^|_)causal$|prefix_lm|bidirectional|temperature|early_exit"
    r"|(^|_)loops?(_|$)|recurren|(^|_)(tied?|shared?|skip)_(layer|block|weight)|layer_(sharing|skip)"
)
# Names of sizes. These match `_ARITHMETIC`, but a wrong size is found by comparing the shapes of the weights.
_SIZE = re.compile(r"(attn|attention)_head(s|_size|_dim)?$|(ffn|mlp|dim|size|width)_multiplier$")
# Maps alternative names to the keys that are read. Such a name is accepted if its value equals that of the key.
_SAME = {
    other: name
    for name, others in (
        ("rms_norm_eps", "layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon rmsnorm_eps rms_norm_epsilon"),
        ("rope_theta", "rope_base rope_freq_base rotary_base rotary_emb_base"),
        ("max_position_embeddings", "context_window context_length n_positions n_ctx"),
        ("head_dim", "rotary_dim"),
    )
    for other in others.split()
}
_NEUTRAL_AT_ONE = re.compile(r"scal(e|ing)|multiplier|factor|coef|pct|percent|(^|_)ratio|temperature|(^|_)loops?(_|$)")
# No number turns an attention scale off, because the default scale depends on the head dimension.
_NEVER_NEUTRAL_NUMBER = re.compile(r"att(n|ention).*(scale|scaling|scalar|multiplier)")


def check_keys(document: Mapping[str, Any], read: frozenset[str], family: str, strict: bool, origin: str) -> None:
    """Raises for keys that may change the output and warns about unknown ones; with `strict`, unknown keys raise too.

    `read` are the keys that the reader uses.
    """
    unknown: list[str] = []
    for key, value in document.items():
        if key in read or key in _WITHOUT_EFFECT:
            continue
        if strict and key not in _USUAL:
            raise ModelError(f"{origin!r} has the unknown setting {shorten(key)}.")
        if accepted := _USUAL.get(key) or _ALIKE.get(key):
            if not _is_accepted(value, accepted):
                raise ModelError(
                    f"{origin!r} sets {shorten(key)} to {shorten(value)}, which is not supported "
                    f"(supported: {', '.join(map(shorten, accepted))})."
                )
        elif _is_harmless(key, value, document, family):
            continue
        elif _ARITHMETIC.search(key.lower()) and not _SIZE.search(key.lower()):
            raise ModelError(
                f"{origin!r} sets the unknown key {shorten(key)} to {shorten(value)}, which may change the output: "
                "remove it from the file if it does not."
            )
        elif not _BOOKKEEPING.search(key.lower()):
            unknown.append(key)
    if unknown:
        names = ", ".join(map(shorten, unknown[:_MOST_NAMED]))
        names += f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        warnings.warn(f"{origin!r}: unknown settings are ignored: {names}.", stacklevel=2)


def _is_accepted(value: Any, accepted: tuple[Any, ...]) -> bool:
    if isinstance(value, list):
        return all(entry in accepted for entry in value)
    return (value.lower() if isinstance(value, str) else value) in accepted


def _is_harmless(key: str, value: Any, document: Mapping[str, Any], family: str) -> bool:
    if _WITHOUT_EFFECT_NAMES.search(key.lower()) or is_neutral(key, value):
        return True
    if isinstance(value, str) and value.lower() in _USUAL["hidden_act"]:
        return True
    if key in _SAME:
        rope = document.get("rope_parameters")
        known = {**document, **(rope if isinstance(rope, dict) else {})}
        return value == known.get(_SAME[key])
    return family == "qwen3" and key in _QUERY_KEY_NORM and value is True


def is_neutral(key: str, value: Any) -> bool:
    """Returns whether a value turns an unknown feature off: null, false, 0, empty, "none", or a factor of 1."""
    if value is None or value is False:
        return True
    if isinstance(value, (str, list, dict)):
        return not value or (isinstance(value, str) and value.lower() in ("none", "default", "full", "full_attention"))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or _NEVER_NEUTRAL_NUMBER.search(key.lower()):
        return False
    return value == (1 if _NEUTRAL_AT_ONE.search(key.lower()) else 0)
