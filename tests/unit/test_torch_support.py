"""Models that the torch engine refuses, from their configuration and from their shape."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvmesh.engine.torch.config import TorchConfig
from kvmesh.engine.torch.support import check
from kvmesh.errors import EngineError
from kvmesh.testing.engine_torch import tiny_llama

LLAMA: dict[str, Any] = {"model_type": "llama"}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantized .awq."),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"sliding_window": 4096}, "window of 4096"),
        ({"sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"]}, "4096"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of linear_attention"),
        ({"layer_types": ["chunked_attention"]}, "layers of chunked_attention"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"attn_logit_softcapping": 50.0}, "caps attention"),
        ({"mamba_d_state": 16}, "state-space"),
        ({"state_size": 16}, "state-space"),
        ({"text_config": {}, "vision_config": {}}, "several models .text_config, vision_config."),
    ],
    ids=str,
)
def test_what_it_would_run_wrongly_is_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(EngineError, match=why) as caught:
        check(LLAMA | config, 8192)
    assert "llama" in caught.value.message
    assert "engine vllm" in caught.value.message


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"sliding_window": None},
        {"sliding_window": 8192},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 4096, "layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "full_attention"]},
        {"quantization_config": None, "attn_logit_softcapping": None},
    ],
    ids=str,
)
def test_what_makes_no_difference_is_not(config: dict[str, Any]) -> None:
    check(LLAMA | config, 8192)


def test_all_reasons_are_told() -> None:
    with pytest.raises(EngineError, match=r"encoder and .*latent"):
        check(LLAMA | {"is_encoder_decoder": True, "kv_lora_rank": 1}, 1)


def loading(folder: Path, config: TorchConfig | None = None) -> str:
    """Return why a folder is refused at load."""
    from kvmesh.engine.torch.loading import load  # noqa: PLC0415 - loads torch

    with pytest.raises(EngineError) as caught:
        load(folder, config or TorchConfig(threads=1))
    return caught.value.message


def folder_of(path: Path, **config: Any) -> Path:
    base = {"max_position_embeddings": 64, "vocab_size": 32, "hidden_size": 16}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(base | config))
    return path


def test_a_type_nobody_knows(tmp_path: Path) -> None:
    assert "can't be loaded" in loading(folder_of(tmp_path / "m", model_type="nobodys"))


def test_a_model_that_is_no_language_model(tmp_path: Path) -> None:
    why = loading(folder_of(tmp_path / "m", model_type="vit"))
    assert "no causal language model" in why


def test_a_model_with_attention_of_its_own(tmp_path: Path) -> None:
    assert "wired into the model" in loading(folder_of(tmp_path / "m", model_type="mpt"))


def test_a_model_with_state(tmp_path: Path) -> None:
    assert "state" in loading(folder_of(tmp_path / "m", model_type="rwkv"))


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    assert "can't be loaded" in loading(folder)


def test_layers_without_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama  # noqa: PLC0415 - loads torch

    folder = tiny_llama(tmp_path / "tiny")
    monkeypatch.setattr(
        modeling_llama.LlamaAttention,
        "forward",
        lambda self, hidden_states, **_: (hidden_states, None),
    )
    assert "layers differ in their KV, or some have none" in loading(folder)
