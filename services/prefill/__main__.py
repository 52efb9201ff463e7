"""Runs one prefill process."""

from kvmesh.host.process import main
from kvmesh.types import Role
from services.prefill.app import app
from services.prefill.config import PrefillConfig

if __name__ == "__main__":
    raise SystemExit(main(Role.PREFILL, PrefillConfig, app))
