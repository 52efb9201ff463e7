"""House rules that no linter has."""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvmesh
import services

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvmesh", "services")
MAX_LINES = 400
MAX_FUNCTION_LINES = 70

# Put together here, so that this file itself doesn't hold what it looks for.
LEFT_FOR_LATER = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
SKIPPED = re.compile(r"\b(mark\.(skip|skipif|xfail)|pytest\.(skip|xfail|importorskip))\b")
HOME = re.compile(r"/(home|Users)/\w+/|/root/")
REGISTRY = re.compile(r"\b(pypi\.org|pythonhosted\.org|npmjs\.org|(deb|ftp)\.debian\.org)\b")
TOP_OF = re.compile(r"#.*\btop of\b")
COMMAND = re.compile(r"`make ([a-z][a-z-]*)|^(?:    |\$ )?make ([a-z][a-z-]*)(?= *$| [A-Z#])")
TARGET = re.compile(r"^([a-z][a-z-]*):(?!=)", re.MULTILINE)


def tracked() -> list[Path]:
    """Return the files that are, or would be, in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    return [path for path in files if path.is_file() and not generated(path)]


def generated(path: Path) -> bool:
    return path.is_relative_to(ROOT / "kvmesh/v1")


FILES = tracked()
SOURCES = [p for p in FILES if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in PACKAGES]
TESTS = [p for p in FILES if p.name.startswith("test_") and p.is_relative_to(ROOT / "tests")]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def lines(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield `file:line` and text of every line of every text file."""
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


def found(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [f"{where} {line.strip()}" for where, line in lines(paths) if pattern.search(line)]


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 20
    assert len(TESTS) > 5


def test_files_fit() -> None:
    counts = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCES}
    assert {str(p.relative_to(ROOT)): n for p, n in counts.items() if n > MAX_LINES} == {}


def test_functions_fit_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_every_module_says_what_it_is() -> None:
    silent = [p for p, tree in TREES.items() if not ast.get_docstring(tree)]
    assert [str(p.relative_to(ROOT)) for p in silent] == []


def test_packages_are_ours() -> None:
    for package in (kvmesh, services):
        assert package.__file__
        assert Path(package.__file__).is_relative_to(ROOT)


def test_nothing_is_left_for_later() -> None:
    assert found(LEFT_FOR_LATER, FILES) == []


def test_no_test_is_skipped() -> None:
    others = [path for path in FILES if path != Path(__file__) and path.suffix == ".py"]
    assert found(SKIPPED, others) == []


def test_test_files_have_names_of_their_own() -> None:
    counts = Counter(path.name for path in TESTS)
    assert [name for name, count in counts.items() if count > 1] == []


def test_nothing_names_a_home_or_a_registry() -> None:
    others = [path for path in FILES if path != Path(__file__)]
    assert found(HOME, others) == []
    assert found(REGISTRY, others) == []


def catches_all(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of handlers that catch everything and don't raise it again."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        wide = any(
            kind is None
            or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"})
            for kind in kinds
        )
        last = node.body[-1]
        if wide and not (isinstance(last, ast.Raise) and last.exc is None):
            yield node.lineno


def test_only_the_top_of_a_request_or_task_catches_everything() -> None:
    caught = [
        f"{path.relative_to(ROOT)}:{number}"
        for path, tree in TREES.items()
        for number in catches_all(tree)
        if not TOP_OF.search(path.read_text(encoding="utf-8").splitlines()[number - 1])
    ]
    assert caught == []


@pytest.mark.parametrize(
    ("handler", "count"),
    [
        ("except Exception as error: log()", 1),
        ("except (BaseException, ValueError): pass", 1),
        ("except: pass", 1),
        ("except BaseException:\n  close()\n  raise", 0),
        ("except Exception:\n  raise ValueError", 1),
        ("except ValueError: pass", 0),
    ],
)
def test_catching_everything_is_seen(handler: str, count: int) -> None:
    assert len(list(catches_all(ast.parse(f"try: work()\n{handler}")))) == count


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_commands_of_the_documents_exist(name: str) -> None:
    targets = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    commands = {
        next(filter(None, match.groups()))
        for _, line in lines([ROOT / name])
        for match in COMMAND.finditer(line)
    }
    assert commands
    assert commands - targets == set()


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (LEFT_FOR_LATER, "# TO" + "DO: later"),
        (SKIPPED, "@pytest.mark.skip" + "if(True)"),
        (HOME, "path = '/home/ada/" + "models'"),
        (REGISTRY, "https://pypi." + "org/simple"),
        (COMMAND, "then `make up`"),
        (COMMAND, "make up"),
        (COMMAND, "    make up ARGS=x"),
        (TARGET, "up: .venv/up.stamp ## Install"),
    ],
)
def test_the_rules_see_what_they_look_for(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)
