"""Chat templates of requests, rendered in a process of their own.

Jinja's sandbox keeps a template from reaching what it should not, but not from running
for ever or from filling the memory: loops nest, macros call each other, strings double.
So it runs in a child, which is bounded in memory, killed when its time is up, and
started again for the next one. The model's own template needs none of this: it is the
operator's.

`python -m services.tokenizer.sandbox MEMORY` is the child: a line of JSON for each template
in, a line out.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Lock, Timer
from types import TracebackType
from typing import Any, Self

from kvmesh.errors import InternalError, InvalidRequestError, RequestTooLargeError, UnavailableError
from services.tokenizer.rendering import Rendering, render

FIELD = "chat_template"

MAX_TEMPLATE_CHARS = 64_000
"""Longest template of a request: several times those that models come with."""

MEMORY_BYTES = 512 * 2**20
"""What a template may take on top of what the child needs for itself."""

START_SECONDS = 60.0
"""How long the child may take to start: a second, on a busy machine several."""


Child = subprocess.Popen[bytes]


class TemplateSandbox:
    """Renders templates of requests one at a time. Usable from several threads.

    Each may run for `seconds`, and its output have `max_chars` characters. Leaving the
    context ends the child; whoever waits for it then gets an error.
    """

    def __init__(self, *, seconds: float, max_chars: int) -> None:
        self._seconds = seconds
        self._max_chars = max_chars
        self._lock = Lock()
        self._child: Child | None = None
        self._closed = False

    def __enter__(self) -> Self:
        """Start the child, so that the first request need not wait for it."""
        with self._lock:
            self._ready()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()  # without the lock, which a rendering may hold
        with self._lock:
            self._drop()

    def render(self, template: str, given: Rendering) -> str:
        """Return the prompt; raises as `rendering.render` does.

        Also raises `InvalidRequestError` for a template that takes too long or too much
        memory, and `RequestTooLargeError` for one that is too long or writes too much.
        """
        if len(template) > MAX_TEMPLATE_CHARS:
            raise RequestTooLargeError(
                f"a chat template may have {MAX_TEMPLATE_CHARS} characters", field=FIELD
            )
        task = {"template": template, "max_chars": self._max_chars, "given": asdict(given)}
        with self._lock:
            answer = self._ask(self._ready(), json.dumps(task).encode() + b"\n")
        if answer is None:
            raise InvalidRequestError(
                f"the chat template took more than {self._seconds:g} s, or too much memory",
                field=FIELD,
            )
        return _read_answer(json.loads(answer))

    def _ask(self, child: Child, task: bytes) -> bytes | None:
        """Return the child's answer, None if it had to be killed or died."""
        answer = _within(self._seconds, child, partial(_exchange, task))
        if not answer.endswith(b"\n"):
            self._drop()
            return None
        return answer

    def _ready(self) -> Child:
        if self._closed:
            raise UnavailableError("the tokenizer is shutting down")
        if self._child is None:
            command = [sys.executable, "-m", "services.tokenizer.sandbox", str(MEMORY_BYTES)]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            if not _within(START_SECONDS, self._child, _read_line):
                self._drop()
                raise InternalError("the process for chat templates did not start")
        return self._child

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()  # closes the pipes and waits


def _within(seconds: float, child: Child, what: Callable[[Child], bytes]) -> bytes:
    """Do `what` with the child, which is killed when it takes longer."""
    timer = Timer(seconds, child.kill)
    timer.start()
    try:
        return what(child)
    finally:
        timer.cancel()
        timer.join()


def _exchange(task: bytes, child: Child) -> bytes:
    assert child.stdin is not None
    try:
        child.stdin.write(task)
        child.stdin.flush()
    except BrokenPipeError:
        return b""
    return _read_line(child)


def _read_line(child: Child) -> bytes:
    assert child.stdout is not None
    return child.stdout.readline()


def _read_answer(answer: dict[str, Any]) -> str:
    if "text" in answer:
        return str(answer["text"])
    kind = RequestTooLargeError if answer["too_large"] else InvalidRequestError
    raise kind(answer["message"], field=answer["field"])


def _serve(memory: int) -> None:
    """Be the child."""
    render("{{ messages }}", Rendering([]))  # all that is imported late, before the limit
    _limit_memory(memory)
    _write({})
    for line in sys.stdin.buffer:
        _write(_answer(json.loads(line)))


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    try:
        text = render(task["template"], Rendering(**task["given"]))
    except InvalidRequestError as error:
        return {"message": error.message, "field": error.field, "too_large": False}
    except (MemoryError, RuntimeError):  # the latter also for more than the sandbox allows
        message = "the chat template takes too much memory or recurses too deeply"
        return {"message": message, "field": FIELD, "too_large": False}
    if len(text) > task["max_chars"]:
        message = f"the chat template writes more than {task['max_chars']} characters"
        return {"message": message, "field": FIELD, "too_large": True}
    return {"text": text}


def _limit_memory(more: int) -> None:
    """Bound the address space of this process, where the system tells how much it has."""
    file = Path("/proc/self/statm")
    if file.exists():
        pages = int(file.read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _write(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
