"""What can go wrong, as few classes with one root.

Each class is a state a caller can act on; its `reason` is the stable name that
travels on the wire and labels metrics. `kvmesh.rpc.status` maps reasons to gRPC
codes and HTTP statuses, in one table.
"""

from enum import StrEnum


class Reason(StrEnum):
    """Stable names of failures. Values are wire format: add, never rename."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"
    OVERLOADED = "OVERLOADED"
    SLOW_READER = "SLOW_READER"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNAVAILABLE = "UNAVAILABLE"
    DRAINING = "DRAINING"
    TICKET_REFUSED = "TICKET_REFUSED"
    TRANSFER_FAILED = "TRANSFER_FAILED"
    ENGINE_FAILED = "ENGINE_FAILED"
    PROTOCOL = "PROTOCOL"
    INTERNAL = "INTERNAL"


class MeshError(Exception):
    """Root of everything kvmesh raises on purpose.

    `message` is for people and safe to show a client: it never quotes a prompt.
    `field` names the input at fault, `retry_after` is in seconds; both may be None.
    """

    reason = Reason.INTERNAL

    def __init__(
        self, message: str, *, field: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after


class InvalidRequestError(MeshError):
    """The caller's input is wrong and will be wrong again; `field` names it."""

    reason = Reason.INVALID_ARGUMENT


class UnauthenticatedError(MeshError):
    """The caller shows no key, or not one of those that are let in."""

    reason = Reason.UNAUTHENTICATED


class UnknownModelError(InvalidRequestError):
    """No process of this mesh has ever announced the model."""

    reason = Reason.UNKNOWN_MODEL


class ContextLengthError(InvalidRequestError):
    """Prompt plus completion do not fit the model's context."""

    reason = Reason.CONTEXT_LENGTH_EXCEEDED


class RequestTooLargeError(InvalidRequestError):
    """A body or message is over the configured limit."""

    reason = Reason.REQUEST_TOO_LARGE


class OverloadedError(MeshError):
    """A bounded queue is full. Worth trying again after `retry_after`."""

    reason = Reason.OVERLOADED


class SlowReaderError(OverloadedError):
    """This request's reader fell behind its bounded queue."""

    reason = Reason.SLOW_READER


class DeadlineError(MeshError):
    """The caller's time is up, or cannot suffice."""

    reason = Reason.DEADLINE_EXCEEDED


class CancelledByCallerError(MeshError):
    """The caller went away or sent a cancel. Nobody reads the answer."""

    reason = Reason.CANCELLED


class UnavailableError(MeshError):
    """The peer is gone, or no worker can serve; another may, or soon will."""

    reason = Reason.UNAVAILABLE


class DrainingError(UnavailableError):
    """The process finishes what it has and takes nothing new."""

    reason = Reason.DRAINING


class TicketError(MeshError):
    """A KV ticket is unknown, used, stale, expired or of another layout."""

    reason = Reason.TICKET_REFUSED


class TransferError(MeshError):
    """KV blocks could not be pulled; none of what arrived may be used."""

    reason = Reason.TRANSFER_FAILED


class EngineError(MeshError):
    """The engine failed on this request, or died."""

    reason = Reason.ENGINE_FAILED


class ProtocolError(MeshError):
    """A peer broke the protocol of a stream, or speaks an unknown revision."""

    reason = Reason.PROTOCOL


class InternalError(MeshError):
    """A bug of ours. The message says nothing more on purpose; the log does."""

    reason = Reason.INTERNAL
