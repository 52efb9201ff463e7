"""The vLLM engine: prefill or decode, KV handed over by vLLM's own NIXL connector."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from typing import Any

from kvmesh.clock import Clock
from kvmesh.engine.base import EngineInfo, EngineRequest, Finish, Prefilled, Seat, Step
from kvmesh.engine.sequence import refuse_prompt_logprobs
from kvmesh.engine.vllm import launch, requests, settings
from kvmesh.engine.vllm.claims import Claimant, serve_claims
from kvmesh.engine.vllm.events import BlockMirror, KvEventReader
from kvmesh.engine.vllm.ledger import TicketLedger
from kvmesh.engine.vllm.settings import VllmConfig
from kvmesh.engine.vllm.stats import Gauge, logger_factory
from kvmesh.engine.vllm.tickets import ENGINE, TicketOffice, fingerprint
from kvmesh.errors import EngineError, InvalidRequestError, OverloadedError, TransferError
from kvmesh.models import ModelError, ModelInfo, read_info
from kvmesh.types import FinishReason, KvEvent, KvTicket, Load, TokenLogprob

logger = logging.getLogger(__name__)

_FIRST_CALL_TIMEOUT = 60.0  # seconds, into an engine core that has just come up
_RELEASE_TIMEOUT = 30.0  # seconds; the core frees between two steps, and a step may be long
_REMOTE_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VllmEngine:
    """One vLLM `AsyncLLM`, its engine core in a child process that dies with this one.

    In the prefill role it leaves KV for others, in the decode role it takes it; it
    generates on its own in both. Start it before the process opens gRPC servers or
    exporters (`kvmesh.engine.vllm.launch` says why). One event loop only.
    """

    def __init__(self, config: VllmConfig, seat: Seat, clock: Clock) -> None:
        self._config = config
        self._seat = seat
        self._clock = clock
        self._launcher = launch.Launcher(self._build)
        self._ledger = TicketLedger()
        self._gauge = Gauge(self._ledger.end)
        self._active: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._resources = AsyncExitStack()
        self._scratch = ""
        self._claimant: Claimant | None = None
        self._llm: Any = None
        self._running: _Running | None = None

    async def start(self) -> EngineInfo:
        """Load the model and start the engine core. Raises `EngineError`."""
        try:
            model = read_info(self._seat.model)
        except ModelError as error:
            raise EngineError(error.message) from error
        scratch = tempfile.TemporaryDirectory(prefix="kvmesh-vllm-", ignore_cleanup_errors=True)
        self._scratch = self._resources.enter_context(scratch)
        self._llm = await self._launcher.start()
        layouts = await self._call("kvmesh_layout", _FIRST_CALL_TIMEOUT)
        claims = serve_claims(self._config.kv_host, self._ledger.claim)
        claim_address = await self._resources.enter_async_context(claims)
        self._claimant = Claimant()
        self._resources.callback(self._claimant.close)
        office = _office(layouts, self._llm, self._config, self._seat, self._clock, claim_address)
        self._running = _Running(self._llm, model, office, self._seat)
        endpoint = self._events_endpoint()
        reader = KvEventReader(self._running.mirror, f"{endpoint}/kv", f"{endpoint}/replay")
        self._own(reader.run())
        return self._running.info

    async def generate(self, request: EngineRequest) -> AsyncIterator[Step]:
        """Prefill and decode here; see `AsyncEngine`."""
        request = requests.continued(request)
        running = self._admit(request)
        arguments = running.arguments(request)
        async with aclosing(self._outputs(request, arguments, None)) as outputs:
            async for output in outputs:
                yield _step(request, output, output.num_cached_tokens or 0)

    async def prefill(self, request: EngineRequest) -> Prefilled:
        """Leave the prompt's KV under a lease; see `PrefillEngine`."""
        running = self._admit_half(request)
        last_token = running.limit(request) == 1
        arguments = running.arguments(request, max_tokens=1)
        count = request.sampling.logprobs
        first: list[int] = []
        logprobs: list[TokenLogprob] = []
        output = None
        try:
            kv = None if last_token else _REMOTE_DECODE
            async with aclosing(self._outputs(request, arguments, kv)) as outputs:
                async for output in outputs:
                    completion = output.outputs[0]
                    first.extend(completion.token_ids)
                    logprobs.extend(requests.logprobs_of(completion, count) or ())
        except asyncio.CancelledError:
            # vLLM may have finished it already, and then holds blocks that nobody knows of.
            self._own(self._free(request.request_id))
            raise
        if output is None:
            raise EngineError("vLLM gave no answer to a prefill")
        cached = output.num_cached_tokens or 0
        stops = request.sampling.stop_token_ids
        finish = requests.finish_of(output.outputs[0], cached, stops)
        prefilled = Prefilled(first, cached, logprobs=None if count is None else logprobs)
        if last_token:
            return replace(prefilled, finish=finish)
        if finish.reason is FinishReason.STOP:
            self._own(self._free(request.request_id))
            return replace(prefilled, finish=finish)
        if not output.kv_transfer_params:
            raise EngineError("vLLM kept no KV after a prefill")
        ticket = running.office.issue(request, output.kv_transfer_params, first)
        self._ledger.hold(ticket, output.kv_transfer_params["remote_request_id"])
        return replace(prefilled, ticket=ticket)

    async def release(self, ticket_id: str) -> bool:
        """Free a ticket's blocks, and return when they are free; see `PrefillEngine`."""
        request_id = self._ledger.request_of(ticket_id)
        if request_id is None:
            return False
        await self._free(request_id.rpartition("-")[0])  # without the suffix vLLM added
        with suppress(TimeoutError):
            async with asyncio.timeout(_RELEASE_TIMEOUT):
                await self._ledger.wait_ended(ticket_id)
        return True

    async def resume(self, request: EngineRequest, ticket: KvTicket) -> AsyncIterator[Step]:
        """Pull the ticket's blocks, then decode from the first token on; see `ResumeEngine`.

        vLLM keeps the blocks of a request that is closed in the middle of a pull until
        the pull has ended.
        """
        running = self._admit_half(request)
        admitted = running.office.admit(request, ticket)
        assert self._claimant is not None  # made in start()
        await self._claimant.claim(admitted.claim_address, ticket.epoch, ticket.ticket_id)
        cached = int(admitted.kv_transfer.get("remote_prefill_cached_tokens") or 0)
        arguments = running.arguments(request)
        started = False
        async with aclosing(self._outputs(request, arguments, admitted.kv_transfer)) as outputs:
            async for output in outputs:
                if output.outputs[0].finish_reason == "error" and not started:
                    raise TransferError("the prompt's KV could not be pulled")
                started = True
                yield _step(request, output, cached)

    def snapshot(self) -> Sequence[int]:
        """Return the cached block hashes; see `KvEventSource`."""
        return self._running.mirror.snapshot() if self._running else []

    def subscribe(self, sink: Callable[[KvEvent], None]) -> Callable[[], None]:
        """Call `sink` with changes of the prefix cache; see `KvEventSource`."""
        if self._running is None:
            raise EngineError("the engine has not started")
        return self._running.mirror.subscribe(sink)

    def load(self) -> Load:
        """Return what the engine is busy with now."""
        if self._running is None or self._llm.errored:
            return Load()
        total, active = self._running.info.total_blocks, len(self._active)
        waiting = min(self._gauge.waiting, active)
        # An idle engine tells nothing, so what it told last is past: only tickets hold blocks.
        used = round(self._gauge.kv_usage * total) if active else 0
        return Load(
            running=active - waiting,
            waiting=waiting,
            used_blocks=max(used, self._ledger.blocks),
            total_blocks=total,
            ticket_blocks=self._ledger.blocks,
            ticket_bytes=self._ledger.bytes,
            received_bytes=self._gauge.received_bytes,
            received_seconds=self._gauge.received_seconds,
        )

    @property
    def preemptions(self) -> int:
        """How often vLLM took a request's blocks for another."""
        return self._gauge.preemptions

    def check(self) -> None:
        """Raise `EngineError` once the engine core is dead or the engine closed."""
        if self._running is None:
            raise EngineError("the engine is not running")
        if self._llm.errored:
            self._ledger.clear()
            raise EngineError("vLLM's engine core died")

    async def aclose(self) -> None:
        """Fail what runs and stop the engine core, within seconds. Idempotent."""
        running, self._running = self._running, None
        if running is not None and not self._llm.errored:
            with suppress(TimeoutError):
                async with asyncio.timeout(_RELEASE_TIMEOUT):
                    await self._llm.abort(tuple(self._active))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._launcher.stop()
        self._ledger.clear()
        await self._resources.aclose()

    def _admit(self, request: EngineRequest) -> "_Running":
        self.check()
        assert self._running is not None  # check() has seen to it
        self._running.check(request)
        return self._running

    def _admit_half(self, request: EngineRequest) -> "_Running":
        running = self._admit(request)
        refuse_prompt_logprobs(request.sampling)
        return running

    async def _outputs(
        self,
        request: EngineRequest,
        arguments: Mapping[str, Any],
        kv_transfer: Mapping[str, Any] | None,
    ) -> AsyncGenerator[Any]:
        """Run a request in vLLM and yield its outputs, with vLLM's errors as the mesh's."""
        from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMServerError

        self._active.add(request.request_id)
        try:
            stream = self._llm.generate(
                requests.prompt_input(request),
                requests.sampling_params(arguments, kv_transfer),
                request.request_id,
                priority=request.priority,
            )
            async with aclosing(stream):
                async for output in stream:
                    yield output
        except VLLMClientError as error:
            field = getattr(error, "parameter", None) or ""
            raise InvalidRequestError(str(error), field=field) from error
        except GracefulHTTPError as error:
            raise OverloadedError(str(error)) from error
        except VLLMServerError as error:
            raise EngineError(f"vLLM failed: {type(error).__name__}") from error
        finally:
            self._active.discard(request.request_id)

    async def _free(self, request_id: str) -> None:
        """Have the engine core end the lease of a finished prefill, if it has one."""
        await self._call("kvmesh_release", _RELEASE_TIMEOUT, [request_id])

    async def _call(self, method: str, timeout: float, *args: Any) -> Any:
        """Call a method on every rank. Raises `EngineError`, also when time is up."""
        from vllm.exceptions import VLLMServerError

        try:
            async with asyncio.timeout(timeout):
                return await self._llm.collective_rpc(method, args=args)
        except TimeoutError as error:
            raise EngineError(f"vLLM's engine core did not answer within {timeout} s") from error
        except (VLLMServerError, RuntimeError) as error:
            raise EngineError(f"vLLM's engine core failed: {type(error).__name__}") from error

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in a task that `aclose` ends; its failure is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._disown)

    def _disown(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task of the vLLM engine failed", exc_info=error)

    def _events_endpoint(self) -> str:
        return f"ipc://{self._scratch}"

    def _build(self) -> Any:
        """Return a running `AsyncLLM`. Blocks; runs in the launcher's thread."""
        cpu = launch.built_for_cpu()
        launch.export(settings.environment(self._config, cpu=cpu))
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if cpu and self._config.fork:
            launch.fork_cores()
        endpoint = self._events_endpoint()
        arguments = settings.engine_args(self._config, self._seat, endpoint, cpu=cpu)
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments), stat_loggers=[logger_factory(self._gauge)]
        )


class _Running:
    """What is known once the engine core is up."""

    def __init__(self, llm: Any, model: ModelInfo, office: TicketOffice, seat: Seat) -> None:
        self._defaults: Mapping[str, Any] = llm.model_config.get_diff_sampling_param()
        self._eos = frozenset(model.eos_token_ids)
        block_size: int = llm.vllm_config.cache_config.block_size
        self.mirror = BlockMirror(block_size, seat.name)
        self.office = office
        self.info = EngineInfo(
            engine=ENGINE,
            model=seat.name,
            context_length=llm.model_config.max_model_len,
            vocab_size=llm.model_config.get_vocab_size(),
            block_size=block_size,
            total_blocks=llm.vllm_config.cache_config.num_gpu_blocks,
            layout_fingerprint=office.fingerprint,
            continues_first_token=False,
        )

    def check(self, request: EngineRequest) -> None:
        info = self.info
        requests.check_request(request, info.context_length, info.vocab_size, self._eos)

    def limit(self, request: EngineRequest) -> int:
        return requests.completion_limit(request, self.info.context_length)

    def arguments(self, request: EngineRequest, max_tokens: int | None = None) -> dict[str, Any]:
        limit = self.limit(request) if max_tokens is None else max_tokens
        return requests.sampling_arguments(request.sampling, self._defaults, self._eos, limit)


def _step(request: EngineRequest, output: Any, cached_tokens: int) -> Step:
    completion = output.outputs[0]
    finish: Finish | None = None
    if output.finished:
        finish = requests.finish_of(completion, cached_tokens, request.sampling.stop_token_ids)
    logprobs = requests.logprobs_of(completion, request.sampling.logprobs)
    prompt = requests.prompt_logprobs_of(request, output)
    return Step(completion.token_ids, finish, logprobs, prompt, cached_tokens)


def _office(
    layouts: Sequence[Mapping[str, Any]],
    llm: Any,
    config: VllmConfig,
    seat: Seat,
    clock: Clock,
    claim_address: str,
) -> TicketOffice:
    by_group = zip(*(layout["block_bytes"] for layout in layouts), strict=True)
    return TicketOffice(
        seat,
        clock,
        fingerprint=fingerprint(layouts, llm.vllm_config.cache_config.block_size),
        block_bytes=[sum(ranks) for ranks in by_group],
        lease_seconds=config.kv_lease_seconds,
        claim_address=claim_address,
    )
