"""The table of options: one record for each option of a consumer group.

To add an option, add it here, and its parsed value to ``subscriptions.handler.Handler``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_type_hints

from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.options import texts, validators
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.delivery_limits import KeyRates, Rate
from django_mysqlqueue.options.texts import Form
from django_mysqlqueue.options.validators import LONGEST_DELAY, or_none
from django_mysqlqueue.text.humanize import shortened

Exceptions = type[Exception] | Sequence[type[Exception]]
RatePerKey = str | Rate | Mapping[str, str | Rate | None] | None
OPTIONAL_COUNT = or_none(validators.integer(1, 1_000_000))
OPTIONAL_CALLS = or_none(validators.integer(1, 10_000))


class Option(NamedTuple):
    """What there is to know about an option, apart from its name, its type and its docstring."""

    parse: Callable[[Any], Any]
    """Return the parsed value, or raise ``validators.Invalid``."""
    form: Form | None = None
    """How an operator writes the value that overrides it; None: it cannot change while subscribers run."""
    default: Any = None
    """The value if it is given nowhere."""
    setting: Literal["", "group", "process"] = ""
    """Whether the setting of the same name applies by default: that of whoever reads the group, or, because a group may
    leave it open, that of each process."""
    registered: bool = False
    """Whether ``migrate`` registers it: it applies as registered, so that all subscribers agree."""
    jobs: Literal["", "queue", "job"] = ""
    """Whether ``OPTIONS`` in ``TASKS`` has it: for the subscribers of a queue of jobs, or for each of its jobs."""
    sql: Literal["", "applied", "refused"] = ""
    """What the procedures for plain SQL do with it. Refused: a group that has it is for subscribers in Python."""

    @property
    def is_nullable(self) -> bool:
        """Whether None is a value."""
        try:
            return self.parse(None) is None
        except validators.Invalid:
            return False


class SubscriberOptions(TypedDict, total=False):
    """The options of ``@subscriber``."""

    mode: Annotated[
        Literal["ordered", "shared"], Option(parse=validators.choice("ordered", "shared"), default="ordered")
    ]
    """``"ordered"``: one subscriber at a time handles a partition's messages one by one, in order. ``"shared"``:
    messages go to any free handler thread, in any order."""
    atomic: Annotated[bool, Option(parse=validators.boolean, default=False, jobs="job")]
    """If True, the handler runs in a transaction that also writes the ack."""
    start: Annotated[
        Literal["earliest", "latest"], Option(parse=validators.choice("earliest", "latest"), default="earliest")
    ]
    """Where a new group starts: ``"earliest"`` or ``"latest"``."""
    on_failure: Annotated[
        Literal["skip", "block"], Option(parse=validators.choice("skip", "block"), default="skip", sql="applied")
    ]
    """In ordered mode, whether later messages of a partition overtake a failed one (``"skip"``) or wait until it is
    settled (``"block"``)."""
    on_expiry: Annotated[
        Literal["skip", "dead_letter"],
        Option(parse=validators.choice("skip", "dead_letter"), default="skip", sql="applied"),
    ]
    """Whether a message that expires before its handling starts is only settled (``"skip"``) or dead-lettered
    (``"dead_letter"``)."""
    claim_size: Annotated[
        int, Option(parse=validators.integer(1, 10_000), form=texts.INTEGER, setting="process", jobs="queue")
    ]
    """Maximum number of messages that a claim takes."""
    prefetch: Annotated[
        int, Option(parse=validators.integer(1, 1_000_000), form=texts.INTEGER, setting="process", jobs="queue")
    ]
    """Number of deliveries that may wait in a process until a handler thread is free. By default, the groups of a
    process share ``PREFETCH``."""
    priority_share: Annotated[int, Option(parse=validators.share, form=texts.INTEGER, setting="process")]
    """While messages with several priorities wait, one of every ``priority_share`` claims, and one of every
    ``priority_share`` starts, is for a lower priority than the highest; 0: none is."""
    poll_interval: Annotated[
        float, Option(parse=validators.number(minimum=0.001), form=texts.DURATION, setting="process", jobs="queue")
    ]
    """Seconds between two polls while messages are available. A process polls as often as the group that polls most
    often requires."""
    max_poll_interval: Annotated[
        float, Option(parse=validators.number(minimum=0.001), form=texts.DURATION, setting="process", jobs="queue")
    ]
    """Longest time in seconds between two polls."""
    visibility_timeout: Annotated[
        float,
        Option(
            parse=validators.number(minimum=0.1, maximum=LONGEST_DELAY),
            form=texts.DURATION,
            setting="group",
            jobs="queue",
            sql="applied",
        ),
    ]
    """In shared mode, seconds until the messages of a lost subscriber are redelivered."""
    max_attempts: Annotated[
        int | None,
        Option(parse=or_none(validators.integer(1)), form=texts.INTEGER, setting="group", jobs="job", sql="applied"),
    ]
    """Number of failed attempts after which a message is dead-lettered; None for no limit."""
    backoff: Annotated[
        Backoff | Mapping[str, float],
        Option(parse=validators.backoff, form=texts.BACKOFF, setting="group", jobs="job", sql="applied"),
    ]
    """A ``Backoff``, or a dict of its fields."""
    timeout: Annotated[
        float | None,
        Option(
            parse=or_none(validators.number(exclusive=True, maximum=LONGEST_DELAY)), form=texts.DURATION, jobs="job"
        ),
    ]
    """For async handlers, seconds after which a call is cancelled and fails with TimeoutError; less than
    ``max_processing_time``; None for no limit. There is no such limit for a sync handler: it runs in a thread, which
    cannot be stopped."""
    concurrency: Annotated[int | None, Option(parse=OPTIONAL_CALLS, form=texts.INTEGER, jobs="queue")]
    """For async handlers, how many calls may run at a time in a process, beside those of other groups. By default, the
    groups of a process share ``ASYNC_CONCURRENCY``."""
    max_processing_time: Annotated[
        float, Option(parse=validators.number(exclusive=True, maximum=LONGEST_DELAY), setting="group", jobs="queue")
    ]
    """Seconds after which a handler counts as hung. Its process then exits."""
    rate: Annotated[
        str | Rate | None,
        Option(parse=or_none(validators.rate), form=texts.TEXT, registered=True, jobs="queue", sql="refused"),
    ]
    """How many of the group's messages start, in all its subscribers together, for example ``"100/s"``; units are
    ``s``, ``m``, ``h`` and ``d``. Retries count, too. Like the other limits below, it applies as ``manage.py migrate``
    has registered it, or as ``queueset`` has overridden it; None: no limit."""
    rate_per_key: Annotated[
        RatePerKey, Option(parse=or_none(validators.key_rates), form=texts.RATES, registered=True, sql="refused")
    ]
    """The same for the messages with each key. If keys have different rates, a dict of rates by key, in which ``"*"``
    stands for all others, for example ``{"acme": "50/s", "*": "5/s"}``; None: no limit."""
    burst: Annotated[int | None, Option(parse=OPTIONAL_COUNT, form=texts.INTEGER, registered=True, jobs="queue")]
    """How many more messages than the rate may start within its period. By default as many as the rate can be kept
    with: a fifth of a second's, and at least 1."""
    max_in_flight: Annotated[
        int | None, Option(parse=OPTIONAL_COUNT, form=texts.INTEGER, registered=True, jobs="queue", sql="refused")
    ]
    """Maximum number of the group's messages that its subscribers have claimed and not finished."""
    max_in_flight_per_key: Annotated[
        int | None, Option(parse=OPTIONAL_COUNT, form=texts.INTEGER, registered=True, sql="refused")
    ]
    """The same for the messages with each key."""
    limit_by: Annotated[str | None, Option(parse=or_none(validators.field_name), form=texts.TEXT, registered=True)]
    """Name of the field of the metadata by which the limits per key count (default: the message's key). They do not
    apply to messages without it."""
    filter: Annotated[
        Mapping[str, Any] | None,
        Option(parse=or_none(validators.filter_policy), form=texts.FILTER, registered=True, sql="refused"),
    ]
    """Which messages the group gets, by their metadata, as a dict in the syntax of Amazon SNS subscription filter
    policies; see the reference of filters. Other messages are passed without a call. Like the limits, it applies as
    ``migrate`` has registered it, or as ``queueset`` has overridden it; None: all messages."""
    reject_on: Annotated[Exceptions, Option(parse=validators.rejected_exceptions, default=())]
    """An exception class, or a sequence of classes. If the handler raises one of them, the message is dead-lettered at
    once, with the traceback as the reason."""
    retry_on: Annotated[Exceptions, Option(parse=validators.exceptions)]
    """An exception class, or a sequence of classes. Only these are retried: any other exception dead-letters the
    message at once. ``reject_on`` is checked first. Database errors that have nothing to do with the message (a lost
    connection, a deadlock) are always retried."""


class BatchOptions(SubscriberOptions, total=False):
    """The options of ``@subscriber(batch=True)``."""

    batch_size: Annotated[int, Option(parse=validators.integer(1, 10_000), form=texts.INTEGER, default=100)]
    """Maximum number of deliveries in the list. The function is called as soon as there is at least one message,
    without waiting for a full list."""


class GroupOptions(BatchOptions, total=False):
    """All options of a group: those of ``@subscriber``, and what belongs to a deployment, not to code."""

    allowed_users: Annotated[
        Sequence[str] | None,
        Option(parse=or_none(validators.allowed_users), form=texts.LIST, registered=True, sql="applied"),
    ]
    """Which database users may use the group, as a list of accounts such as ``billing@10.0.%``. Like the limits, it
    applies as ``migrate`` has registered it, or as ``queueset`` has overridden it; None: all users."""
    paused_tasks: Annotated[
        Sequence[str], Option(parse=validators.task_paths, form=texts.LIST, default=(), sql="refused")
    ]
    """The dotted paths of tasks of a queue of jobs whose jobs are not claimed. ``queuepause --task`` and ``queueresume
    --task`` change it."""


OPTIONS: Mapping[str, Option] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(GroupOptions, include_extras=True).items()
}
"""All options by name, in the order in which they are listed."""
IN_CODE = frozenset(BatchOptions.__annotations__)
"""Options that ``@subscriber`` takes."""
_OF_CODE = "can only be given to @subscriber: exception classes belong to the handler's code"
NOT_IN_GROUPS: Mapping[str, str] = {
    "reject_on": _OF_CODE,
    "retry_on": _OF_CODE,
    "paused_tasks": "can only be set while subscribers run: queuepause GROUP TOPIC --task PATH",
}
"""Options that ``GROUPS`` does not take, and why."""
OVERRIDABLE = tuple(name for name, option in OPTIONS.items() if option.form is not None)
"""Options that an operator can override while subscribers run."""
REGISTERED = tuple(name for name, option in OPTIONS.items() if option.registered)
OF_PROCESSES = tuple(name for name, option in OPTIONS.items() if option.setting == "process")
"""Options that a handler may leave open: then the settings of its process apply."""

OF_QUEUES = tuple(name for name, option in OPTIONS.items() if option.jobs == "queue")
"""Options that a queue of jobs has in ``OPTIONS`` of ``TASKS``, for its subscribers."""


def check_option(name: str, value: Any) -> Any:
    """Return the parsed value of an option.

    Raises:
        ValueError: the value is invalid; the text names the option, the value and the rule.
    """
    if name not in OPTIONS:
        raise ValueError(f"{name} is not a handler option")
    try:
        return OPTIONS[name].parse(value)
    except validators.Invalid as error:
        # A filter can be long, and its error names the place in it.
        raise ValueError(f"{name}={shortened(repr(value), most=200)}: {error}") from None


def storable(value: Any) -> Any:
    """Return a parsed value in the form in which it is stored as JSON."""
    if isinstance(value, Backoff):
        return {field.name: getattr(value, field.name) for field in fields(Backoff)}
    if isinstance(value, (FilterPolicy, KeyRates)):
        return value.as_json()
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Rate) else value


def parse_text(name: str, text: str) -> Any:
    """Return the value that a text stands for, as it is typed on a command line or into a form.

    Durations may have a unit (``ms``, ``s``, ``m``, ``h``, ``d``; default: seconds). ``none`` means no limit.
    ``backoff`` is a list such as ``initial=1s,factor=2,maximum=1h,jitter=0.1``; the fields that are left out have their
    defaults. ``filter`` is JSON, and so is ``rate_per_key`` if keys have different rates.

    Raises:
        ValueError: the text is not such a value; the error names the option, the text and the rule.
    """
    text = text.strip()
    option = OPTIONS.get(name)
    if option is None or option.form is None:
        return text  # check_override refuses it
    if text.lower() == "none" and option.is_nullable:
        return None
    return option.form.read(name, text)


def as_text(name: str, value: Any) -> str:
    """Return the text of a parsed or stored value, which ``parse_text`` reads again."""
    if value is None:
        return "none"
    value = storable(value)
    option = OPTIONS.get(name)
    written = None if option is None or option.form is None else option.form.write(value)
    if written is not None:
        return written
    return value if isinstance(value, str) else json.dumps(value, default=str)
