"""A model folder without weights, for engines that need none.

Its tokenizer knows bytes and four ChatML markers, so it encodes any text exactly.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvmesh.models.files import new_folder

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_END, _START, _STOP = _SPECIAL

# Printable ASCII, and as ByteLevel writes it, space.
_READABLE = frozenset(map(chr, range(0x21, 0x7F))) | {"\u0120"}

"""The token ids from here on stand for printable characters."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_folder(path: Path, *, context_length: int = 32768) -> Path:
    """Make a model folder at `path`, or leave the one that is there; returns `path`.

    Deterministic: equal arguments make equal files, whoever makes them.
    """
    if (path / "config.json").is_file():
        return path
    with new_folder(path) as folder:
        tokenizer = _tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"))
        stop = _SPECIAL.index(_STOP)
        _write(folder / "config.json", _config(tokenizer, context_length, stop))
        _write(folder / "generation_config.json", {"eos_token_id": stop})
        _write(folder / "tokenizer_config.json", _tokenizer_config(context_length))
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return path


def _tokenizer() -> Tokenizer:
    # What can be read comes last: a simulated engine that samples from there makes plain text.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (c in _READABLE, c))
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return tokenizer


def _config(tokenizer: Tokenizer, context_length: int, stop: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": context_length,
        "bos_token_id": _SPECIAL.index(_START),
        "eos_token_id": stop,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }


def _tokenizer_config(context_length: int) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _START,
        "eos_token": _STOP,
        "unk_token": _END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "chat_template": CHAT_TEMPLATE,
    }


def _write(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
