"""Loads a model from a local folder, and finds out what KV it makes."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvmesh.engine.torch import support
from kvmesh.engine.torch.attention import ATTENTION, IMPLEMENTATION, register
from kvmesh.engine.torch.config import TorchConfig
from kvmesh.engine.torch.memory import KvShape
from kvmesh.engine.torch.packing import pack
from kvmesh.errors import EngineError
from kvmesh.models import ModelInfo, read_info

_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run, and what is known of it. `digest` tells it from others."""

    model: Any
    info: ModelInfo
    shape: KvShape
    device: Any
    context_length: int
    digest: str


def load(folder: Path, config: TorchConfig) -> Loaded:
    """Load a model. Blocks for seconds. Raises `EngineError` if it can't be run, saying why."""
    info = read_info(folder)
    raw = json.loads((folder / "config.json").read_bytes())
    context_length = min(config.context_length or info.context_length, info.context_length)
    support.check(raw, context_length)
    device = torch.device(config.device if config.device != "auto" else _best_device())
    if device.type == "cpu":
        torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    dtype = _dtype(config.dtype, device)
    model = _load(folder, raw, dtype).to(device).eval()
    if device.type == "cpu" and config.pack_weights:
        pack(model)
    shape = _probe(model, raw, context_length)
    return Loaded(model, info, shape, device, context_length, _digest(folder))


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(name: str, device: Any) -> Any:
    if name == "auto":
        # Most CPUs have no fast path for anything shorter, and none is exact.
        return torch.float32 if device.type == "cpu" else "auto"
    return getattr(torch, name)


def _load(folder: Path, raw: dict[str, Any], dtype: Any) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        family = _family(AutoModelForCausalLM, config, raw)
        register()
        return family.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            local_files_only=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError) as error:
        raise EngineError(f"the model in {folder} can't be loaded: {error}") from error


def _family(auto: Any, config: Any, raw: dict[str, Any]) -> Any:
    """Return the model's class, if it is one that leaves attention and KV to us."""
    if type(config) not in auto._model_mapping:
        raise support.refusal(raw, "transformers has no causal language model for it")
    family = auto._model_mapping[type(config)]
    if getattr(family, "_is_stateful", False):
        raise support.refusal(raw, "it keeps state besides KV")
    if not getattr(family, "_supports_attention_backend", False):
        raise support.refusal(raw, "its attention is wired into the model")
    return family


class _Probe:
    """An attention that notes what each layer brings."""

    def __init__(self) -> None:
        self.layers: list[tuple[int, int, int, int]] = []
        self.dtype: Any = None
        self.variants: dict[str, object] = {}

    def asked(self, variants: Sequence[tuple[str, object]]) -> None:
        """Note variants."""
        self.variants.update(variants)

    def attend(self, layer: int, query: Any, key: Any, value: Any, scaling: float | None) -> Any:
        """Note shapes; the output is of no importance."""
        self.layers.append((layer, key.shape[1], key.shape[2], value.shape[2]))
        self.dtype = key.dtype
        return query


def _probe(model: Any, raw: dict[str, Any], context_length: int) -> KvShape:
    """Run one token through the model to see the shape of its KV; warms it up too."""
    probe = _Probe()
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        try:
            model(input_ids=token, position_ids=token, use_cache=False, **{ATTENTION: probe})
        except (KeyError, RuntimeError, TypeError, AttributeError) as error:
            raise support.refusal(raw, f"its attention is not a plain one ({error!r})") from error
    shapes = {layer[1:] for layer in probe.layers}
    numbers = [layer[0] for layer in probe.layers]
    if len(shapes) != 1 or numbers != list(range(len(numbers))):
        raise support.refusal(raw, "its layers differ in their KV, or some have none")
    kv_heads, key_dim, value_dim = shapes.pop()
    if key_dim != value_dim:
        raise support.refusal(raw, "its keys and values differ in size")
    window = probe.variants.pop("sliding_window", None)
    if isinstance(window, int) and window < context_length:
        raise support.refusal(raw, f"its attention slides over a window of {window} tokens")
    if probe.variants:
        raise support.refusal(raw, f"its attention has {', '.join(sorted(probe.variants))}")
    return KvShape(len(numbers), kv_heads, key_dim, probe.dtype)


def _digest(folder: Path) -> str:
    """Digest what tells two models apart, without reading all of their weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for pattern in _WEIGHTS:
        for path in sorted(folder.glob(pattern)):
            with path.open("rb") as file:
                digest.update(f"{path.name}:{path.stat().st_size}:".encode())
                digest.update(file.read(1 << 20))
    return digest.hexdigest()
