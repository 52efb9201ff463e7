"""Small tokenizers made on the spot, as model folders: no download, some milliseconds.

Each function fills a folder with `tokenizer.json`, `tokenizer_config.json`,
`chat_template.jinja` and `config.json`, as a real model's folder has them, and returns it.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>")

_SENTENCES = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "What is the capital of France? The quick brown fox jumps over the lazy dog.",
    "You are a helpful assistant. The user asks, and the assistant answers the user.",
    "1234567890 times 42 is a number; so is 3.14159. It's what they've said they'd do!",
    "def main(args):\n    for index in range(10):\n        print(index)\n",
    "Größe, café, naïve — “quoted” text… und so weiter.",
)


def byte_level_folder(folder: Path) -> Path:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it: any bytes, no BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return _write(folder, json.loads(tokenizer.to_str()), bos_token=None)


def sentencepiece_folder(folder: Path) -> Path:
    """BPE as Llama 2 has it: spaces as marks, bytes as tokens for rare characters, BOS."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=["<unk>", "<s>", *SPECIAL_TOKENS, *bytes_],
        limit_alphabet=60,
    )
    # Split only for training: the model itself merges across words, as the real ones may.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581"), "merged_with_next")
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.pre_tokenizer = None
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] not in bytes_
    ]
    return _write(folder, content, bos_token="<s>")


def wordpiece_folder(folder: Path) -> Path:
    """WordPiece as BERT has it: the decoder puts spaces between words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, show_progress=False, special_tokens=["[UNK]", *SPECIAL_TOKENS]
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return _write(folder, json.loads(tokenizer.to_str()), bos_token=None)


def _write(folder: Path, tokenizer: dict[str, Any], bos_token: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    size = 1 + max(
        *tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])
    )
    config = {
        "tokenizer_class": "TokenizersBackend",
        "bos_token": bos_token,
        "eos_token": "<|im_end|>",
        "model_max_length": 10**9,
    }
    texts = {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(config),
        "chat_template.jinja": CHAT_TEMPLATE,
        "config.json": json.dumps({"vocab_size": size}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder
