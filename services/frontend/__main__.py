"""Runs one frontend process."""

from kvmesh.host.process import main
from kvmesh.types import Role
from services.frontend.app import app
from services.frontend.config import FrontendConfig

raise SystemExit(main(Role.FRONTEND, FrontendConfig, app))
