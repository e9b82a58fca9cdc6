"""Bad arguments of public functions: a clear error of this package, whatever the value, and nothing is stored."""

from __future__ import annotations

import datetime
import inspect
import linecache
import math
import traceback
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict, Unpack

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import django_mysqlqueue
from django_mysqlqueue import filter_policies, inspection, operations, tails, tasks, testing
from django_mysqlqueue.models import OutboxMessage
from tests.app import jobs
from tests.support.harness import USING
from tests.support.internals import GroupRef, checked, groups, spelled_out

pytestmark = [pytest.mark.django_db, pytest.mark.any_engine]
PACKAGE = str(Path(django_mysqlqueue.__file__).parent)
UTC = datetime.UTC
BY = {"actor": "me", "reason": "r"}
CALLS = {
    django_mysqlqueue: {
        "acancel": (("i",), {"topic": "t"}),
        "apublish": (("t", 1), {}),
        "apublish_many": (("t", [1]), {}),
        "areschedule": (("i",), {"topic": "t", "delay": 1}),
        "cancel": (("i",), {"topic": "t"}),
        "publish": (("t", 1), {}),
        "publish_many": (("t", [1]), {}),
        "recurring_message": (("n", "* * * * *"), {"topic": "t", "payload": 1}),
        "reschedule": (("i",), {"topic": "t", "delay": 1}),
        "subscriber": (("t",), {"group": "g"}),
    },
    operations: {
        "cancel": (("t", ["i"]), BY),
        "cancel_move": (("t", "x"), BY),
        "create_recurring": (("n", "shop.tasks.mail"), {"every": 60, **BY}),
        "dead_letter": (("g", "t"), {"ids": ["i"], **BY}),
        "delete_recurring": (("n",), BY),
        "delete_quarantined": (([1],), BY),
        "discard": (("t.dlq",), {"ids": ["i"], **BY}),
        "drop_group": (("g", "t"), BY),
        "drop_reader": (("r",), BY),
        "edit": (("t.dlq", 1), {"id": "i", **BY}),
        "erase": (("t", "k"), BY),
        "forget": (("s",), BY),
        "import_celery_beat": ((), BY),
        "move_topic": (("t", "x"), BY),
        "pause": (("g", "t"), BY),
        "pause_recurring": (("n",), BY),
        "prepare_move": (("t", "x"), BY),
        "publish": (("t", 1), BY),
        "redrive": (("t.dlq",), {"ids": ["i"], **BY}),
        "release": (("g", "t", ["k"]), BY),
        "replay": (("g", "t", 1, 2), BY),
        "requeue_quarantined": (([1],), BY),
        "reschedule": (("t", ["i"], None), BY),
        "resume": (("g", "t"), BY),
        "resume_recurring": (("n",), BY),
        "retry": (("g", "t"), {"ids": ["i"], **BY}),
        "run_recurring": (("n",), BY),
        "seek": (("g", "t", "earliest"), BY),
        "set_group_mode": (("g", "t", "shared"), BY),
        "settings": (("g", "t", {"claim_size": 5}), BY),
        "update_recurring": (("n",), {"every": 60, **BY}),
    },
    inspection: {
        "check_health": ((), {}),
        "count_jobs": ((), {}),
        "find_causes": ((), {}),
        "find_problems": ((), {}),
        "get_job": (("i",), {}),
        "get_message": (("t", "i"), {}),
        "get_overview": ((), {}),
        "list_dead_letters": (("t",), {}),
        "list_errors": ((), {}),
        "list_jobs": ((), {}),
        "list_messages": ((), {}),
        "list_options": ((), {}),
        "list_partitions": ((), {}),
        "list_quarantined": ((), {}),
        "list_scheduled": ((), {}),
        "list_schedules": ((), {}),
        "summarize_tasks": ((), {}),
    },
    tails: {"atail": (("t",), {}), "tail": (("t",), {})},
    tasks: {
        "acancel_job": ((None,), {}),
        "async_wait": ((), {}),
        "call": ((jobs.add,), {}),
        "cancel_job": ((None,), {}),
        "enqueue_chain": ((), {}),
        "enqueue_many": (([],), {}),
        "job": ((), {}),
        "progress_of": ((None,), {}),
        "recurring": (("* * * * *",), {}),
        "wait": ((), {}),
    },
    testing: {
        "clear_queue": ((), {}),
        "deliver_all": ((), {}),
        "delivery": ((), {}),
        "enqueued": ((), {}),
        "job_context": ((jobs.add,), {}),
        "published": ((), {}),
        "python_clock": ((), {}),
        "run_recurring": (("n",), {}),
    },
    filter_policies: {"parse": (({"a": [1]},), {})},
}
"""A valid call of each public function, or one that is refused only because the queue is empty."""
ONES = [
    *(None, True, -1, 0, 1, 2**63, -(2**70), 1e308, math.nan, math.inf, -0.5, Decimal("NaN")),
    *("", "x", "x" * 300, "\ud800", "\0", "a b", "é", "9" * 30, b"x", bytearray(b"x")),
    *(object(), int, len, ValueError("x"), frozenset({1}), set(), (), (1, 2)),
    *(datetime.datetime(2020, 1, 1), datetime.datetime.max.replace(tzinfo=UTC), datetime.date(2020, 1, 1)),  # noqa: DTZ001
    *(datetime.timedelta.max, datetime.timedelta.min, datetime.timedelta(0)),
]
VALUES = st.recursive(
    st.sampled_from(ONES) | st.text(max_size=5) | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=2),
    max_leaves=3,
)
FUNCTIONS = [(module, name) for module, calls in CALLS.items() for name in calls]


def names_of(module):
    names = module.__all__ if hasattr(module, "__all__") else ["parse"]
    return {name for name in names if inspect.isfunction(inspect.unwrap(getattr(module, name)))}


@pytest.mark.parametrize("module", CALLS, ids=lambda one: one.__name__)
def test_every_public_function_is_here(module):
    assert set(CALLS[module]) == names_of(module)


def is_clear(error):
    """Whether this package has raised an exception itself, with a text."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno).strip()
    return last.filename.startswith(PACKAGE) and line.startswith("raise") and bool(str(error))


def call(function, bound):
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return async_to_sync(function)(*bound.args, **bound.kwargs)
    found = function(*bound.args, **bound.kwargs)
    if isinstance(found, tails.Tail):
        with found:
            if not bound.arguments.get("follow"):
                list(found)
    return found


@pytest.mark.parametrize(("module", "name"), FUNCTIONS, ids=lambda one: getattr(one, "__name__", one))
def test_a_bad_argument_is_a_clear_error(module, name):
    function, (args, kwargs) = getattr(module, name), CALLS[module][name]
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not parameters:
        return

    @settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(st.tuples(st.sampled_from(parameters), VALUES), min_size=1, max_size=2))
    def check(changes):
        bound = signature.bind(*args, **kwargs)
        for parameter, value in changes:
            several = {parameter.VAR_POSITIONAL: (value,), parameter.VAR_KEYWORD: {"x": value}}
            bound.arguments[parameter.name] = several.get(parameter.kind, value)
        with transaction.atomic():
            before = OutboxMessage.objects.count()
            try:
                call(function, bound)
            except Exception as error:
                if not is_clear(error):
                    raise
                assert OutboxMessage.objects.count() == before
            transaction.set_rollback(True)

    check()


def test_an_error_names_the_argument_its_value_and_the_rule():
    @checked(only=("limit",))
    def listed(limit: int | None = None, *, other: str = "") -> None: ...

    listed(1, other=5)
    for value in (0, True, "5", [[]]):
        with pytest.raises(ValueError, match=r"limit .*: must be an integer of at least 1 or None"):
            listed(value)
    with pytest.raises(TypeError, match=r"listed\(\) got an unexpected keyword argument 'nothing'"):
        listed(nothing=1)


class Shared(TypedDict, total=False):
    who: Required[Annotated[str, "who does it."]]
    times: Annotated[int, "how often.", 1]
    where: Annotated[str | None, "the place."]


class More(Shared, total=False):
    why: Annotated[str, "the reason.", ""]


def test_arguments_that_functions_share_are_in_the_signature_and_the_docstring():
    @spelled_out
    def done(what: str, **how: Unpack[More]) -> Any:
        """Do it.

        Args:
            what: the work.
            where: elsewhere.

        Raises:
            OSError: never.
        """
        return what, how

    shown = "(what: 'str', *, who: str, times: int = 1, where: str | None = None, why: str = '') -> 'Any'"
    assert str(inspect.signature(done)) == shown
    assert inspect.getdoc(done).splitlines()[2:-3] == [
        "Args:",
        "    what: the work.",
        "    where: elsewhere.",
        "    who: who does it.",
        "    times: how often.",
        "    why: the reason.",
    ]
    assert done("x", who="me", why="so") == ("x", {"who": "me", "why": "so"})
    with pytest.raises(TypeError, match=r"done\(\) missing a required argument: 'who'"):
        done("x")
    with pytest.raises(TypeError, match=r"done\(\) got an unexpected keyword argument 'whom'"):
        done("x", who="me", whom="you")
