"""Which models this engine can run, from their config.json alone. No torch here."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvmesh.errors import EngineError

_NESTED = ("text_config", "vision_config", "audio_config", "speech_config")
_STATES = ("ssm_cfg", "mamba_d_state", "state_size", "ssm_state_size", "linear_num_key_heads")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def check(config: Mapping[str, Any], context_length: int) -> None:
    """Raise `EngineError` for a model that this engine would run wrongly or not at all.

    `context_length` is what it is to serve: a window at least as long makes no difference.
    """
    reasons = list(_reasons(config, context_length))
    if reasons:
        raise refusal(config, " and ".join(reasons))


def refusal(config: Mapping[str, Any], reason: str) -> EngineError:
    """Return the error that says why a model is refused, and which engine may run it."""
    model = config.get("model_type", "model of unknown type")
    return EngineError(f"the torch engine can't run this {model}: {reason}; use the engine vllm")


def _reasons(config: Mapping[str, Any], context_length: int) -> Iterator[str]:
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        yield f"its weights are quantized ({method or 'in an unknown format'})"
    if config.get("is_encoder_decoder"):
        yield "it has an encoder"
    if nested := [key for key in _NESTED if key in config]:
        yield f"it is made of several models ({', '.join(nested)})"
    if config.get("kv_lora_rank"):
        yield "it has multi-head latent attention (kv_lora_rank)"
    if config.get("attn_logit_softcapping"):
        yield "it caps attention scores (attn_logit_softcapping)"
    if any(config.get(key) for key in _STATES):
        yield "it has state-space or linear attention layers"
    yield from _layers(config, context_length)


def _layers(config: Mapping[str, Any], context_length: int) -> Iterator[str]:
    types = config.get("layer_types")
    kinds = set(types) if isinstance(types, list) else set()
    if others := sorted(kinds - {_FULL, _SLIDING}):
        yield f"it has layers of {', '.join(others)}"
    window = config.get("sliding_window")
    slides = _SLIDING in kinds or (not kinds and config.get("use_sliding_window", True))
    if isinstance(window, int) and slides and window < context_length:
        yield (
            f"its attention slides over a window of {window} tokens "
            f"(up to that context_length it can be served)"
        )
