"""Runs a loaded model over spans of tokens. Blocks: used in a thread of its own."""

from collections.abc import Sequence

import torch

from kvmesh.engine.torch.attention import ATTENTION
from kvmesh.engine.torch.config import TorchConfig
from kvmesh.engine.torch.loading import Loaded
from kvmesh.engine.torch.memory import KvMemory
from kvmesh.engine.torch.plan import Pick, Span
from kvmesh.engine.torch.sampler import measure, pick
from kvmesh.engine.torch.step import lay
from kvmesh.engine.torch.workspace import Workspace
from kvmesh.kv.base import PoolLayout


class Runner:
    """A model and its KV."""

    def __init__(
        self, loaded: Loaded, layout: PoolLayout, memory: memoryview, config: TorchConfig
    ) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self.memory = KvMemory(memory, layout, loaded.shape, loaded.device)
        on_cpu = loaded.device.type == "cpu"
        budget = config.workspace_mb << 20
        self._workspace = Workspace(loaded.shape, budget) if on_cpu and budget else None

    def run(self, spans: Sequence[Span]) -> tuple[Sequence[Span], list[Pick]]:
        """Compute the KV of spans and pick what comes behind.

        Returns the spans in another order, and in that order what was picked.
        """
        with torch.inference_mode():
            laid = lay(spans, self.memory.kv, self._workspace)
            output = self._model(
                input_ids=laid.token_ids,
                position_ids=laid.positions,
                use_cache=False,
                logits_to_keep=laid.picks,
                **{ATTENTION: laid.attention},
            )
            sequences = [span.sequence for span in laid.spans if span.picks]
            if not sequences:
                return laid.spans, []
            logits = output.logits[0]
            tokens = pick(logits, sequences)
            logprobs = measure(logits, sequences, tokens)
        return laid.spans, list(zip(tokens, logprobs, strict=True))
