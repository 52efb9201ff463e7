"""Runs one router process."""

from kvmesh.host.process import main
from kvmesh.types import Role
from services.router.app import app
from services.router.config import RouterConfig

if __name__ == "__main__":
    raise SystemExit(main(Role.ROUTER, RouterConfig, app))
