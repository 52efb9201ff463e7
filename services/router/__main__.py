"""Runs one router process."""

import gc

from kvmesh.host.process import main
from kvmesh.types import Role
from services.router.app import app
from services.router.config import RouterConfig

if __name__ == "__main__":
    # All that is imported stays: a collection that looks at it, too, holds decisions up for 17 ms.
    gc.freeze()
    raise SystemExit(main(Role.ROUTER, RouterConfig, app))
