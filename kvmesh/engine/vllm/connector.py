"""vLLM's NIXL connector with what a mesh needs added. Runs inside vLLM's own processes.

vLLM loads it by module path (`kv_connector_module_path`), under fork and spawn alike, so
nothing has to be patched from outside. It adds three things: leases that end early on
demand, word of every lease that ended, and an engine core that dies with its worker.
"""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from kvmesh.engine.vllm.settings import ENDED_KEY, OWNER_KEY

_PR_SET_PDEATHSIG = 1
_POLL_MICROSECONDS = 1000  # NIXL's thread polls without a pause by default: a core, burnt


class MeshStats(NixlKVConnectorStats):  # type: ignore[misc]
    """NIXL's transfer figures, and the requests whose blocks P has freed."""

    def reset(self) -> None:
        """Forget everything counted so far."""
        super().reset()
        self.data[ENDED_KEY] = []

    def is_empty(self) -> bool:
        """Say whether there is nothing to report."""
        return super().is_empty() and not self.data.get(ENDED_KEY)


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """vLLM's pull connector; its name is kept since vLLM checks for it by name."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        if role == KVConnectorRole.SCHEDULER:
            super().__init__(vllm_config, role, kv_cache_config)
            _obey_only(vllm_config.kv_transfer_config.kv_connector_extra_config.get(OWNER_KEY))
        else:
            with _gentle_on_cpu():
                super().__init__(vllm_config, role, kv_cache_config)
            self.connector_worker.xfer_stats = MeshStats()
        self._ended = MeshStats()
        self._to_release: set[str] = set()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return stats that hold `data`, or none."""
        return MeshStats() if data is None else MeshStats(data=data)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Note, in the scheduler, whose leases have ended on every rank."""
        super().update_connector_output(connector_output)
        self._ended.data[ENDED_KEY].extend(connector_output.finished_sending or ())

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what is new since the last call, or None."""
        if self.connector_worker is not None:
            return super().get_kv_connector_stats()
        return None if self._ended.is_empty() else self._ended.clone_and_reset()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Add the released requests to those whose sending has ended."""
        results = super().get_transfer_results(finished_req_ids)
        if self._to_release:
            results.finished_sending.update(self._end_released())
        return results

    def release(self, request_ids: list[str]) -> None:
        """End the leases of requests at the worker's next step.

        Ids are the caller's: vLLM adds a random suffix to them.
        """
        self._to_release.update(request_ids)

    def _end_released(self) -> list[str]:
        worker = self.connector_worker
        known = {get_base_request_id(r): r for r in worker._reqs_to_process}
        ended = []
        for base_id in tuple(self._to_release):
            request_id = known.get(base_id)
            if request_id is not None:
                if worker._reqs_to_send.pop(request_id, None) is None:
                    continue  # its lease starts with the next step
                worker._reqs_to_process.discard(request_id)
                ended.append(request_id)
            self._to_release.discard(base_id)
        return ended


class WorkerExtension:
    """Methods that the mesh calls on every rank, through `collective_rpc`."""

    def kvmesh_release(self, request_ids: list[str]) -> None:
        """Free the blocks that these finished prefills hold for other engines."""
        get_kv_transfer_group().release(request_ids)

    def kvmesh_layout(self) -> dict[str, Any]:
        """Return the bytes of a KV block of each cache group here, and vLLM's layout digest."""
        connector = get_kv_transfer_group()
        groups = connector.kv_cache_config.kv_cache_groups
        return {
            "block_bytes": [g.kv_cache_spec.page_size_bytes * len(g.layer_names) for g in groups],
            "compat_hash": connector.connector_worker.compat_hash,
        }


def _obey_only(owner: int | None) -> None:
    """End when the worker says so or is gone, not when Ctrl-C reaches the whole group.

    The kernel kills this process when the thread that made it ends.
    """
    if owner is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _gentle_on_cpu() -> Iterator[None]:
    """Keep vLLM's connector from pinning itself to one core and NIXL from spinning on it."""
    if not current_platform.is_cpu():
        yield
        return
    # Not at the top: vLLM sets UCX up just before it imports NIXL, and must be first.
    from nixl import _api as nixl_api

    bindings, affinity = nixl_api.nixlBind, os.sched_getaffinity(0)
    nixl_api.nixlBind = _PatientBindings(bindings)
    try:
        yield
    finally:
        nixl_api.nixlBind = bindings
        os.sched_setaffinity(0, affinity)


class _PatientBindings:
    """NIXL's native module, whose agents wait between polls."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802 - NIXL's name
        config.pthrDelay = _POLL_MICROSECONDS
        return self._bindings.nixlAgent(name, config)
