"""Configuration that several roles have in common."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The one model that a tokenizer or worker process serves."""

    path: Path | None = field(
        default=None, metadata={"help": "folder of the model in Hugging Face layout"}
    )
    name: str = field(
        default="", metadata={"help": "name that clients ask for; empty: the folder's name"}
    )

    @property
    def served_name(self) -> str:
        """The name that clients ask for."""
        return self.name or (self.path.name if self.path else "")
