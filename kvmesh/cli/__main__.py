"""`python -m kvmesh.cli` is the `kvmesh` command."""

from kvmesh.cli.main import main

main()
