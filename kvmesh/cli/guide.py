"""What a newcomer reads once the cluster is up: an answer, the addresses, and how to call it."""

import json
import textwrap
from pathlib import Path

from rich.padding import Padding
from rich.syntax import Syntax

from kvmesh.cli import rest
from kvmesh.cli.console import default_state_dir, out
from kvmesh.cli.state import ClusterState
from kvmesh.config import environment

API_KEY_VARIABLE = "KVMESH_API_KEY"
"""Variable with the key to show, where the frontend wants one."""

QUESTION = "What is the capital of France?"


async def print_sample(cluster: ClusterState) -> None:
    """Ask one question and show the answer as it comes. Raises CommandError if none does."""
    key = environment().get(API_KEY_VARIABLE, "")
    messages = [{"role": "user", "content": QUESTION}]
    ask = rest.Ask(messages, max_tokens=32, temperature=0.0, api_key=key)
    out.print(f"  [bold]You[/]     {QUESTION}\n  [bold]Model[/]   ", end="")
    async for text in rest.chat(cluster.http[0], cluster.model, ask):
        out.print(text, end="", markup=False)
    out.print()
    if cluster.engine == "sim":
        out.print("          (the simulated engine makes up its tokens)", style="dim")
    out.print()


def print_guide(cluster: ClusterState, state_dir: Path, *, detached: bool) -> None:
    """Show where everything is and what to type next."""
    option = "" if state_dir == default_state_dir() else f" --state-dir {state_dir}"
    for url in cluster.http:
        out.print(f"  OpenAI REST  {url}/v1", markup=False)
    for address in cluster.grpc:
        out.print(f"  gRPC         {address}  (kvmesh.v1.InferenceService)", markup=False)
    out.print(f"  logs         {state_dir / 'logs'}", markup=False)
    out.print("\nAsk it something:")
    _code(f'kvmesh chat{option} "Why is the sky blue?"', "bash")
    _code(_curl(cluster), "bash")
    _code(_python(cluster), "python")
    out.print(f"Look at it with [bold]kvmesh status{option}[/].")
    if detached:
        out.print(f"It runs in the background; [bold]kvmesh down{option}[/] stops it.")
    else:
        out.print("Ctrl-C stops it.")


def _curl(cluster: ClusterState) -> str:
    messages = [{"role": "user", "content": "Hello!"}]
    body = json.dumps({"model": cluster.model, "messages": messages})
    return (
        f"curl {cluster.http[0]}/v1/chat/completions \\\n"
        f"  -H 'Content-Type: application/json' \\\n  -d '{body}'"
    )


def _python(cluster: ClusterState) -> str:
    return (
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{cluster.http[0]}/v1", api_key="unused")\n'
        'messages = [{"role": "user", "content": "Hello!"}]\n'
        f'answer = client.chat.completions.create(model="{cluster.model}", messages=messages)\n'
        "print(answer.choices[0].message.content)"
    )


def _code(text: str, language: str) -> None:
    if not out.is_terminal:
        out.print(textwrap.indent(text, "  ") + "\n", markup=False)
        return
    syntax = Syntax(text, language, background_color="default", theme="ansi_dark")
    out.print(Padding(syntax, (0, 0, 1, 2)))
