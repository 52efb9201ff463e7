"""What can be made to go wrong in a simulated engine, for tests and drills."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from kvmesh.errors import EngineError

REFUSALS = ("", "generate", "prefill", "resume")


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults to inject; the defaults inject none."""

    slow_start_seconds: float = field(
        default=0.0, metadata={"help": "Seconds that the start takes longer.", "min": 0}
    )
    fail_start: bool = field(default=False, metadata={"help": "Fail to start."})
    stall_after_steps: int = field(
        default=0, metadata={"help": "Stall once, after this many steps; 0: never.", "min": 0}
    )
    stall_seconds: float = field(
        default=0.0, metadata={"help": "Seconds that the stall lasts; 0: for good.", "min": 0}
    )
    crash_after_steps: int = field(
        default=0, metadata={"help": "Die after this many steps; 0: never.", "min": 0}
    )
    drop_leases: bool = field(
        default=False,
        metadata={"help": "Free the blocks of a KV ticket at once, as if its lease had run out."},
    )
    spoil_blocks: int = field(
        default=0,
        metadata={"help": "Last blocks of each pull that lose their content.", "min": 0},
    )
    refuse: str = field(
        default="",
        metadata={"help": "Kind of work refused as overload.", "choices": REFUSALS},
    )


class Injector:
    """Makes the faults of one engine's start and step loop happen."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._steps = 0

    async def before_start(self) -> None:
        """Take time, or raise `EngineError`."""
        await asyncio.sleep(self._faults.slow_start_seconds)
        if self._faults.fail_start:
            raise EngineError("the engine failed to start (injected)")

    async def before_step(self) -> None:
        """Take time, or raise `EngineError`, once enough steps were made."""
        faults, done = self._faults, self._steps
        self._steps += 1
        if done == faults.crash_after_steps > 0:
            raise EngineError("injected")
        if done == faults.stall_after_steps > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(faults.stall_seconds or None):
                    await asyncio.Event().wait()
