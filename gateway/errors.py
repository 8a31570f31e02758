"""Everything that can go wrong with a request, by whose fault it is.

    Fault
    |-- ClientFault          the request cannot be served as it is: 4xx, never counts against a worker
    |     BadRequest 400, Unauthorized 401, Forbidden 403, NotFound 404, WrongMethod 405, TimedOut 408,
    |     TooLarge 413, ExpectationFailed 417, RateLimited 429, GuessedTooOften 429, HeadTooLarge 431, NotImplementedHere 501,
    |     WrongVersion 505
    |-- WorkerFault          a worker broke its promise; counts against it
    |     Refused 502, Unresolved 502, Reset 502, Malformed 502, ServerError 502, Stalled 504
    |-- Backpressure 503     a worker is full: not a fault of anybody, goes elsewhere
    `-- GatewayFault         nothing that could serve the request
          NoWorker 503, NoConnection 503, NoKeys 503, Crowded 503, Overloaded 429, OutOfTime 504, Internal 500

A `Fault` says what happened in words for the client; dialects say it in the client's shape. Messages never hold a worker's
address, a credential or a prompt.
"""


class Fault(Exception):
    """Base of the tree.

    ``status``: HTTP status before the first byte; ``kind``: stable snake_case word, used in bodies and metrics;
    ``retry_after``: seconds after which trying again makes sense, or ``None``; ``reason``: the rule by which it was turned
    away, where there are several, or ``None``.
    """

    status = 500
    kind = "internal_error"
    reason: str | None = None

    def __init__(self, message: str, *, retry_after: float | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.param = param


class ClientFault(Fault):
    """The client's request cannot be served as it is."""

    status = 400
    kind = "invalid_request_error"


class BadRequest(ClientFault):
    """Malformed HTTP, malformed JSON, a bad field."""


class Unauthorized(ClientFault):
    """No key, or an unknown one."""

    status = 401
    kind = "authentication_error"


class Forbidden(ClientFault):
    """The key may not do this."""

    status = 403
    kind = "permission_error"


class NotFound(ClientFault):
    """No such path, model or object."""

    status = 404
    kind = "not_found_error"


class WrongMethod(ClientFault):
    """The path exists, the method does not; ``allowed`` lists those that do."""

    status = 405

    def __init__(self, path: str, allowed: str) -> None:
        super().__init__(f"{path} takes {allowed}")
        self.allowed = allowed


class TimedOut(ClientFault):
    """The client did not finish its request in time."""

    status = 408
    kind = "request_timeout"


class TooLarge(ClientFault):
    """The body is over the limit."""

    status = 413
    kind = "request_too_large"


class ExpectationFailed(ClientFault):
    """An ``Expect`` other than ``100-continue``."""

    status = 417


class RateLimited(ClientFault):
    """``tenant`` is over what it is granted; ``limit`` says of what."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: float, tenant: str, limit: str) -> None:
        super().__init__(message, retry_after=retry_after)
        self.tenant = tenant
        self.reason = self.limit = limit


class GuessedTooOften(ClientFault):
    """Too many unknown credentials came from one address; this one was not looked at."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message, retry_after=retry_after)


class HeadTooLarge(ClientFault):
    """The request's head is over its limits."""

    status = 431


class NotImplementedHere(ClientFault):
    """Upgrades and tunnels."""

    status = 501


class WrongVersion(ClientFault):
    """Neither HTTP/1.0 nor HTTP/1.1."""

    status = 505


class WorkerFault(Fault):
    """A worker broke its promise."""

    status = 502
    kind = "upstream_error"


class Refused(WorkerFault):
    """No connection could be made."""


class Unresolved(WorkerFault):
    """The worker's name has no address."""


class Reset(WorkerFault):
    """The connection ended before the response did."""


class Malformed(WorkerFault):
    """The worker's answer is not HTTP."""


class ServerError(WorkerFault):
    """The worker answered 5xx, or an error event before any content."""


class Stalled(WorkerFault):
    """The worker did not answer, or stopped answering, within its time."""

    status = 504
    kind = "upstream_timeout"


class Backpressure(Fault):
    """A worker is full."""

    status = 503
    kind = "overloaded_error"


class GatewayFault(Fault):
    """Nothing that could serve the request."""

    status = 503
    kind = "service_unavailable"


class NoWorker(GatewayFault):
    """The model is known, but no worker that has it may be used now."""


class NoConnection(GatewayFault):
    """All connections to the worker are in use."""


class NoKeys(GatewayFault):
    """A token cannot be checked: its issuer's keys are not known yet."""


class Crowded(GatewayFault):
    """More client connections than this process takes."""

    kind = "overloaded_error"


class Overloaded(GatewayFault):
    """More is asked than the fleet can serve in time: it was turned away by ``reason``."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: float, reason: str) -> None:
        super().__init__(message, retry_after=retry_after)
        self.reason = reason


class OutOfTime(GatewayFault):
    """No answer had begun within the time that the client gave."""

    status = 504
    kind = "timeout"
    reason = "timeout"


class Internal(GatewayFault):
    """A defect of the gateway's own."""

    status = 500
    kind = "internal_error"
