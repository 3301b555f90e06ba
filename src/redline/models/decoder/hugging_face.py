"""Converts the `config.json` of Llama, Mistral, Qwen2 and Qwen3 to a `DecoderConfig` and back.

`config_keys` checks the keys that this module does not read.
"""

import math
from collections.abc import Mapping
from typing import Any

from redline.errors import ModelError
from redline.models.decoder.config import DecoderConfig
from redline.models.decoder.config_keys import check_keys, is_neutral
from redline.ops.rope import LinearScaling, Llama3Scaling, Scaling

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_READ = frozenset(
    key
    for keys in (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads",
        "head_dim max_position_embeddings original_max_position_embeddings rms_norm_eps rope_theta",
        "rope_scaling rope_parameters tie_word_embeddings attention_bias sliding_window use_sliding_window",
        "max_window_layers layer_types",
    )
    for key in keys.split()
)
# A file with more layers than this is certainly wrong, and its model would exhaust memory before a missing weight is
# noticed.
_MOST_LAYERS = 10_000
# The defaults of transformers for 'max_position_embeddings'.
_DEFAULT_CONTEXT = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config(document: Mapping[str, Any], origin: str, strict: bool = False) -> DecoderConfig:
    """Reads the config of a supported family; missing keys have the defaults of transformers.

    With `strict`, every unknown key raises, even if its value turns a feature off.
    """
    family = document.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(f"{origin!r} has the unsupported model_type {family!r} (supported: {', '.join(FAMILIES)}).")
    check_keys(document, _READ, family, strict, origin)
    document = {"max_position_embeddings": _DEFAULT_CONTEXT[family], **document}
    try:
        return _config(family, document, origin, strict)
    except KeyError as error:
        raise ModelError(f"{origin!r} has no {error.args[0]!r}.") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{origin!r} has an invalid value: {error}.") from error


def _config(family: str, document: Mapping[str, Any], origin: str, strict: bool) -> DecoderConfig:
    heads, layers = _whole(document, "num_attention_heads"), _whole(document, "num_hidden_layers")
    if heads < 1:
        raise ValueError(f"num_attention_heads must be 1 or more, not {heads:,}")
    if not 1 <= layers <= _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers must be 1 to {_MOST_LAYERS:,}, not {layers:,}")
    width = _whole(document, "hidden_size")
    bias = document.get("attention_bias", False) and family in ("llama", "qwen3")
    if document.get("attention_bias") and not bias:
        raise ModelError(f"{origin!r} sets 'attention_bias', which {family} does not have.")
    head_dim = _whole(document, "head_dim", 128 if family == "qwen3" else width // heads)
    if family == "qwen2" and head_dim != width // heads:
        raise ModelError(f"{origin!r} sets 'head_dim' to {head_dim}, which qwen2 does not have.")
    base, scaling = _rope(document, origin, strict)
    shared = 8 if family == "mistral" and "num_key_value_heads" not in document else heads
    return DecoderConfig(
        vocabulary=_whole(document, "vocab_size"),
        width=width,
        layers=layers,
        heads=heads,
        mlp_width=_whole(document, "intermediate_size"),
        key_value_heads=_whole(document, "num_key_value_heads", shared),
        head_dim=head_dim,
        context=_whole(document, "max_position_embeddings"),
        rope_base=base,
        rope_scaling=scaling,
        norm_eps=_finite("rms_norm_eps", document.get("rms_norm_eps", 1e-6)),
        qkv_bias=family == "qwen2" or bool(bias),
        out_bias=bool(bias),
        query_key_norm=family == "qwen3",
        tied_embeddings=bool(document.get("tie_word_embeddings", False)),
        windows=_windows(family, document, layers, origin),
    )


def _whole(document: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Returns an integer setting; the default replaces a missing key, null and zero."""
    value = document[key] if default is None else document.get(key) or default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key!r} is {value!r}, not an integer")
    return value


def _finite(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{key!r} is {value!r}, not a finite number")
    return float(value)


def _rope(document: Mapping[str, Any], origin: str, strict: bool) -> tuple[float, Scaling | None]:
    """Returns RoPE's base and scaling, from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(document.get(key), dict | None):
            raise ValueError(
                f'{key!r} is {document[key]!r}, not null or an object such as {{"rope_type": "linear", "factor": 2.0}}'
            )
    new, old = document.get("rope_parameters"), document.get("rope_scaling")
    settings = _with_rope_type(new or old or {})
    base = _finite("rope_theta", settings.pop("rope_theta", None) or document.get("rope_theta") or 10_000.0)
    if new and old and {"rope_theta": base} | settings != {"rope_theta": base} | _with_rope_type(old):
        raise ModelError(f"{origin!r} has 'rope_parameters' and 'rope_scaling', and they disagree; remove one.")
    kind = settings.pop("rope_type")
    takes = {"default": (), "linear": ("factor",), "llama3": _LLAMA3}
    original = "original_max_position_embeddings"
    if kind == "llama3" and document.get(original):
        settings.setdefault(original, document[original])
    if not isinstance(kind, str) or kind not in takes:
        raise ModelError(f"{origin!r} has the unsupported rope type {kind!r} (supported: {', '.join(takes)}).")
    for key, value in settings.items():
        if key not in takes[kind] and (strict or not (key == original or is_neutral(key, value))):
            raise ModelError(f"{origin!r} has the rope setting {key!r}, which the rope type {kind!r} does not have.")
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, LinearScaling(_finite("factor", settings["factor"]))
    factor, low, high, length = (_finite(key, settings[key]) for key in _LLAMA3)
    return base, Llama3Scaling(factor, low, high, int(length))


def _with_rope_type(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with their type under `rope_type`, which early versions of transformers called `type`."""
    kind = settings.get("rope_type") or settings.get("type") or "default"
    return {key: value for key, value in settings.items() if key != "type"} | {"rope_type": kind}


def _windows(family: str, document: Mapping[str, Any], layers: int, origin: str) -> tuple[int | None, ...]:
    types = document.get("layer_types")
    if not isinstance(types, list | None):
        raise ValueError(f"'layer_types' is {types!r}, not a list of {' and '.join(_LAYER_TYPES)}")
    for name in types or []:
        if name not in _LAYER_TYPES:
            raise ModelError(
                f"{origin!r} has the unsupported layer type {name!r} (supported: {', '.join(_LAYER_TYPES)})."
            )
    if document.get("sliding_window") is not None:
        _whole(document, "sliding_window")
    window = document.get("sliding_window", 4096 if family in ("mistral", "qwen2", "qwen3") else None)
    if family in ("qwen2", "qwen3"):
        if not document.get("use_sliding_window", False):
            window = None
        if types is None:
            first = _whole({"max_window_layers": 28, **document}, "max_window_layers")
            types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
    elif family == "llama":
        # A window that is not shorter than the context has no effect, so it is accepted.
        if window and document.get("use_sliding_window", True) and window < _whole(document, "max_position_embeddings"):
            raise ModelError(f"{origin!r} sets a sliding window, which llama does not have.")
        window, types = None, types or ["full_attention"] * layers
    elif types is None:
        types = ["sliding_attention" if window else "full_attention"] * layers
    elif set(types) != {"sliding_attention" if window else "full_attention"}:
        raise ModelError(f"{origin!r} has 'layer_types' that contradict its 'sliding_window'.")
    if len(types) != layers:
        raise ModelError(f"{origin!r} has {len(types)} 'layer_types' for {layers} layers.")
    if "sliding_attention" in types and window is None:
        raise ModelError(f"{origin!r} has 'sliding_attention' in 'layer_types', but no sliding window.")
    return tuple(window if name == "sliding_attention" else None for name in types)


def family_of(config: DecoderConfig) -> str:
    """Returns a family that supports all options of the config."""
    windows = set(config.windows)
    alike = len(windows) == 1
    if config.query_key_norm and config.qkv_bias == config.out_bias and len(windows - {None}) <= 1:
        return "qwen3"
    plain_heads = config.head_dim * config.heads == config.width
    if not config.query_key_norm:
        if config.qkv_bias and not config.out_bias and plain_heads and len(windows - {None}) <= 1:
            return "qwen2"
        if windows == {None} and config.qkv_bias == config.out_bias:
            return "llama"
        if alike and not config.qkv_bias and not config.out_bias:
            return "mistral"
    raise ModelError(
        "no Hugging Face architecture has this decoder's combination of biases, query and key norms, windows and "
        "head_dim."
    )


def write_config(config: DecoderConfig, dtype: str, stop_tokens: tuple[int, ...] = ()) -> dict[str, Any]:
    """Returns a `config.json` with the rotary settings in the formats of transformers 5 and of earlier versions."""
    family = family_of(config)
    scaling: dict[str, Any] = {}
    if isinstance(config.rope_scaling, LinearScaling):
        scaling = {"rope_type": "linear", "factor": config.rope_scaling.factor}
    elif isinstance(config.rope_scaling, Llama3Scaling):
        scaling = {"rope_type": "llama3", **{key: getattr(config.rope_scaling, key) for key in _LLAMA3}}
    document: dict[str, Any] = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "dtype": dtype,
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_theta": config.rope_base,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_type": "default"} | scaling | {"rope_theta": config.rope_base},
        "bos_token_id": None,
        "eos_token_id": (stop_tokens[0] if len(stop_tokens) == 1 else list(stop_tokens)) if stop_tokens else None,
    }
    if family != "qwen2":
        document["head_dim"] = config.head_dim
    if family in ("llama", "qwen3"):
        document["attention_bias"] = config.qkv_bias
    window = next((window for window in config.windows if window is not None), None)
    if family == "mistral":
        document["sliding_window"] = window
    if family in ("qwen2", "qwen3"):
        document |= {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": next((i for i, w in enumerate(config.windows) if w is not None), config.layers),
            "layer_types": ["full_attention" if w is None else "sliding_attention" for w in config.windows],
        }
    return document
