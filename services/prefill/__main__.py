"""Runs one prefill process."""

from kvmesh.host.worker import worker_main
from kvmesh.types import Role
from services.prefill.app import app
from services.prefill.config import PrefillConfig

if __name__ == "__main__":
    raise SystemExit(worker_main(Role.PREFILL, PrefillConfig, app))
