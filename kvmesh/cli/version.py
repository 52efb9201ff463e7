"""`kvmesh version`."""

import platform
from importlib.metadata import PackageNotFoundError, version

from kvmesh.cli.console import out, subcommand

app = subcommand()


@app.command("version")
def show() -> None:
    """Print the version."""
    try:
        found = version("kvmesh")
    except PackageNotFoundError:  # run from a checkout that isn't installed
        found = "(not installed)"
    out.print(f"kvmesh {found}, Python {platform.python_version()}")
