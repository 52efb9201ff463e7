"""What a tokenizer process is made of."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from kvmesh.config import ConfigError
from kvmesh.host.process import Process, Service
from services.tokenizer.chat import Render
from services.tokenizer.codec import Codec
from services.tokenizer.config import LimitsConfig, TokenizerConfig
from services.tokenizer.lanes import Lanes
from services.tokenizer.sandbox import TemplateSandbox
from services.tokenizer.servicer import SERVICE_NAME, Host, TokenizerServicer


@asynccontextmanager
async def app(config: TokenizerConfig, process: Process) -> AsyncIterator[Service]:
    """Yield the service once the tokenizer is loaded.

    Raises `ConfigError` without a model folder, or with one that holds no tokenizer.
    """
    limits = config.tokenizer
    if config.model.path is None:
        raise ConfigError("model.path: required, set --model-path or KVMESH_MODEL_PATH")
    model = config.model.served_name
    host = Host(
        process.identity,
        process.gate,
        process.clock,
        process.telemetry.tracer,
        process.telemetry.meter,
    )
    async with AsyncExitStack() as stack:
        render = await _sandbox(limits, stack) if limits.allow_request_templates else None
        codec = await asyncio.to_thread(
            Codec,
            config.model.path,
            max_prompt_chars=limits.max_prompt_chars,
            render_foreign=render,
        )
        lanes = await stack.enter_async_context(
            Lanes(
                long_size=limits.long_prompt_chars,
                max_waiting=limits.max_waiting,
                max_waiting_size=limits.max_waiting_chars,
            )
        )
        servicer = TokenizerServicer(codec, model, lanes, host, limits)
        yield Service({SERVICE_NAME: servicer.register}, {"model": model}, failed=lanes.failed)


async def _sandbox(limits: LimitsConfig, stack: AsyncExitStack) -> Render:
    """Start what renders chat templates of requests."""
    sandbox = TemplateSandbox(
        seconds=limits.request_template_seconds, max_chars=limits.max_prompt_chars
    )
    await asyncio.to_thread(stack.enter_context, sandbox)
    return sandbox.render
