"""A handler with its resolved options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from asgiref.sync import async_to_sync

from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.delivery_limits import LIMIT_OPTIONS, DeliveryLimits, KeyRates, Rate
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.subscriptions.timeouts import limited

if TYPE_CHECKING:
    from django_mysqlqueue.service.deliveries import Claimed, JobName, Settlement
    from django_mysqlqueue.service.payloads import Body
    from django_mysqlqueue.service.received import ReceivedMessage
    from django_mysqlqueue.subscriptions.unknown_tasks import UnknownTasks

HandlerFunction = Callable[..., Any]


class Monitor(Protocol):
    """A thread beside the handlers of a kind in a database."""

    def __init__(self, using: str) -> None:
        """Prepare a thread for the database with an alias."""

    def start(self) -> None:
        """Start the thread."""

    def stop(self) -> None:
        """Stop the thread."""


@dataclass(frozen=True, slots=True)
class Handler:
    """A handler with all options resolved. Durations are in seconds."""

    ref: GroupRef
    function: HandlerFunction
    where: str
    mode: Literal["ordered", "shared"]
    atomic: bool
    start: Literal["earliest", "latest"]
    on_failure: Literal["skip", "block"]
    max_attempts: int | None
    visibility_timeout: float
    max_processing_time: float
    backoff: Backoff
    batch: bool = False
    """Whether the function takes a list of deliveries."""
    batch_size: int = 1
    """Maximum number of deliveries per call."""
    is_async: bool = False
    """Whether the function was declared with ``async def``."""
    reject_on: tuple[type[Exception], ...] = ()
    """See ``rejections.is_rejected``."""
    retry_on: tuple[type[Exception], ...] | None = None
    """If None, all exceptions that ``reject_on`` does not name are retried."""
    timeout: float | None = None
    """For async handlers: the time after which a call is cancelled, or None."""
    concurrency: int | None = None
    """For async handlers: how many calls may run in a process. None: a share of the process's."""
    claim_size: int | None = None
    """Maximum number of messages per claim. None: the process's."""
    prefetch: int | None = None
    """Number of deliveries that may wait in a process. None: a share of the process's."""
    priority_share: int | None = None
    """One of every ``priority_share`` claims is for lower priorities; 0: none is. None: the process's."""
    poll_interval: float | None = None
    """Time between two polls while there are messages. None: the process's."""
    max_poll_interval: float | None = None
    """Longest time between two polls. None: the process's."""
    rate: Rate | None = None
    rate_per_key: Rate | KeyRates | None = None
    burst: int | None = None
    max_in_flight: int | None = None
    max_in_flight_per_key: int | None = None
    limit_by: str | None = None
    on_expiry: Literal["skip", "dead_letter"] = "skip"
    filter: FilterPolicy | None = None
    """Which messages the group gets, by their metadata. None: all."""
    allowed_users: tuple[str, ...] | None = None
    """Which database users may use the group. None: all."""
    paused_tasks: tuple[str, ...] = ()
    """The tasks of which no jobs are claimed."""

    more_time: ClassVar[str] = "@subscriber(max_processing_time=…)"
    """How to allow more time for calls."""
    runs_jobs: ClassVar[bool] = False
    """Whether the deliveries are of jobs."""
    monitor: ClassVar[type[Monitor] | None] = None
    """The class of the monitor that a subscriber runs for all of its handlers of this kind in a database."""

    @property
    def unknown(self) -> UnknownTasks | None:
        """The tasks that this process could not run; None if the group has no tasks."""
        return None

    @property
    def limits(self) -> DeliveryLimits:
        """The limits, for all subscribers of the group together."""
        return DeliveryLimits(**{name: getattr(self, name) for name in LIMIT_OPTIONS})

    @property
    def shared(self) -> bool:
        """Whether the mode is shared."""
        return self.mode == "shared"

    @property
    def longest_time(self) -> float:
        """The longest time for which a call may run."""
        return self.max_processing_time

    def time_limit(self, state: object) -> float:
        """Return the time for which the call for a delivery may run.

        ``state``: what ``claimed`` has returned for it.
        """
        return self.max_processing_time

    @property
    def may_be_async(self) -> bool:
        """Whether some calls are coroutines."""
        return self.is_async

    def is_on_loop(self, state: object) -> bool:
        """Return whether the call for a delivery is a coroutine, which needs no thread.

        ``state``: what ``claimed`` has returned for it.
        """
        return self.is_async

    def runs_receivers(self) -> bool:
        """Return whether receivers of the project run before or after a call, in a thread if that is a coroutine.

        Those of the signals of deliveries do not count.
        """
        return False

    def must_prepare(self, deliveries: Sequence[ReceivedMessage]) -> bool:
        """Return whether ``prepare`` has something to do."""
        return False

    def prepare(self, using: str, deliveries: Sequence[ReceivedMessage]) -> None:
        """Prepare a call, in its thread and before its transaction.

        Raises:
            django.db.Error: the database refuses or does not answer. The deliveries are released.
        """

    def is_atomic(self, deliveries: Sequence[ReceivedMessage]) -> bool:
        """Return whether the call for some deliveries runs in a transaction that also writes their acks."""
        return self.atomic

    def claimed(self, using: str, bodies: Mapping[Claimed, Body]) -> Mapping[Claimed, object]:
        """Note that deliveries have been claimed; return what ``Delivery._state`` will be, if there is something.

        Raises:
            django.db.Error: the database refuses or does not answer. The deliveries are released.
        """
        return {}

    def job_of(self, state: object) -> JobName | None:
        """Return the job that a delivery is of; None if it is of none.

        ``state``: what ``claimed`` has returned for it.
        """
        return None

    def tasks(self) -> Sequence[str]:
        """Return the paths of the tasks that this process has declared for the group, in the order of declaration."""
        return ()

    def acked_here(self, using: str, deliveries: Sequence[ReceivedMessage]) -> None:
        """Write what belongs to the acks of an atomic call, in its transaction."""

    def retried_here(self, using: str, settlements: Sequence[Settlement]) -> bool:
        """Write that an atomic call is to be repeated later although its writes commit; return whether it is."""
        return False

    def settled(
        self, deliveries: Sequence[ReceivedMessage], settlements: list[Settlement], error: BaseException | None
    ) -> list[Settlement]:
        """Return the settlements to write after a call.

        ``error``: the exception that the call has raised, or None.
        """
        return settlements

    def call(self, given: Any) -> Any:
        """Call the function, and return its result.

        ``given``: a delivery, or with ``batch`` a list of them.
        """
        return async_to_sync(self.acall)(given) if self.is_async else self.function(given)

    async def acall(self, given: Any) -> Any:
        """Call the function of an async handler, and return its result."""
        function = self.function if self.timeout is None else limited(self.function, self.timeout, self.where)
        return await function(given)


def mode_text(handler: Handler, registered: str) -> str:
    """Return the error for a group that is registered with a mode other than its handler's."""
    return (
        f"The group {handler.ref.group!r} on {handler.ref.topic!r} is registered as {registered}, but "
        f"{handler.where} has mode={handler.mode!r}. Change the handler, or stop the group's subscribers and run: "
        f"manage.py queuegroupmode {handler.ref.group} {handler.ref.topic} {handler.mode}"
    )
