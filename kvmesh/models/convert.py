"""`python -m kvmesh.models.convert MODEL.gguf FOLDER`: GGUF into a Hugging Face folder.

A process of its own, so that nobody else has to load torch. Writes how far it is, from
0 to 1, a line each.
"""

import os
import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Write weights (bfloat16), configuration, tokenizer and chat template into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _report(0.2)
    source, name = str(gguf.parent), gguf.name
    quantization = GgufConfig(dequantize=True, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, quantization_config=quantization, dtype=torch.bfloat16
    )
    _report(0.7)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    _report(0.9)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # some are written for the owner's eyes only
    _report(1.0)


def _report(fraction: float) -> None:
    sys.stdout.write(f"{fraction}\n")
    sys.stdout.flush()


def _main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # noqa: TID251 - written for a library, not read
    gguf, folder = map(Path, sys.argv[1:])
    convert(gguf, folder)


if __name__ == "__main__":
    _main()
