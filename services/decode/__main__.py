"""Runs one decode process."""

from kvmesh.host.worker import worker_main
from kvmesh.types import Role
from services.decode.app import app
from services.decode.config import DecodeConfig

if __name__ == "__main__":
    raise SystemExit(worker_main(Role.DECODE, DecodeConfig, app))
