"""Linear layers that are fast for a few rows on a CPU.

For one row, and for many, torch's own product is as good as any. For a handful, as when a
few sequences decode, oneDNN takes half the time if it finds the weights in its own layout.
"""

from typing import Any

import torch
from torch.nn.functional import linear

_FEWEST, _MOST = 2, 16  # rows for which packed weights win


def pack(model: Any) -> None:
    """Give a float32 model on a CPU linear layers that pack their weights when that helps.

    The packed weights are a second copy, made when first used. Does nothing where this torch
    has no oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is torch.nn.Linear and module.weight.dtype is torch.float32:
            module.forward = _Packed(module)


class _Packed:
    """The forward of a linear layer."""

    def __init__(self, module: Any) -> None:
        self._weight = module.weight
        self._bias = module.bias
        self._packed: Any = None

    def __call__(self, rows: Any) -> Any:
        """Return the layer's output for [..., features]."""
        if not _FEWEST <= rows.numel() // rows.shape[-1] <= _MOST:
            return linear(rows, self._weight, self._bias)
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight)
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
