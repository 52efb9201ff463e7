"""Runs a loaded model over spans of tokens. Blocks: used in a thread of its own."""

from collections.abc import Sequence

import torch

from kvmesh.engine.torch.attention import ATTENTION
from kvmesh.engine.torch.config import TorchConfig
from kvmesh.engine.torch.loading import Loaded
from kvmesh.engine.torch.memory import KvMemory
from kvmesh.engine.torch.plan import Computed, Span
from kvmesh.engine.torch.sampler import measure, pick, score
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

    def run(self, spans: Sequence[Span]) -> list[Computed]:
        """Compute the KV of spans, pick what comes behind and score what the prompt has there.

        Returns that in another order than the spans'.
        """
        with torch.inference_mode():
            laid = lay(spans, self.memory.kv, self._workspace)
            output = self._model(
                input_ids=laid.token_ids,
                position_ids=laid.positions,
                use_cache=False,
                logits_to_keep=laid.keep,
                **{ATTENTION: laid.attention},
            )
            sequences = [span.sequence for span in laid.spans if span.picks]
            logits, count = output.logits[0], len(sequences)
            tokens = pick(logits[:count], sequences) if sequences else []
            picks = zip(tokens, measure(logits, sequences, tokens), strict=True)
            scores = score(logits[count:], laid.spans)
        return [
            Computed(span, next(picks) if span.picks else None, scored)
            for span, scored in zip(laid.spans, scores, strict=True)
        ]
