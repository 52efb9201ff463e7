"""Model folders: fetching, converting, making and reading.

A model is a local Hugging Face folder; nothing here reaches a model hub.
"""

from kvmesh.models.fetch import SMOLLM2, Progress, default_cache, fetch_smollm2, resolve
from kvmesh.models.info import ModelError, ModelInfo, read_info
from kvmesh.models.tiny import tiny_folder

__all__ = [
    "SMOLLM2",
    "ModelError",
    "ModelInfo",
    "Progress",
    "default_cache",
    "fetch_smollm2",
    "read_info",
    "resolve",
    "tiny_folder",
]
