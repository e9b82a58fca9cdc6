"""A Hypothesis state machine drives the real code against the model in ``queue_model``.

Publishers with open transactions that commit late or roll back, subscribers
that start, stop, vanish, freeze and thaw, handlers that ack, nack, snooze,
reject and raise, time, GC and groups that come and go, in any order. After
every step the model compares all tables and says which invariant of the design
is broken; at the end a healthy subscriber drains what is left.

Time stands still except where a rule moves it: the database's clock, as the
queue's statements see it, and the monotonic clock of all subscribers together
(the heart is the real one, beaten by hand). So a run is the same every time.
The normal test run plays the same examples always: a red run is red again, and
a change that it blames is to blame. New examples are looked for on demand, with
HYPOTHESIS_PROFILE=long and MODEL_EXAMPLES=n; a failure prints how to play it
again (``@reproduce_failure``) and its steps, to be kept as a plain test at the end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connections
from django.test import override_settings
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import LATER, LEASE, SPECS, Machine, Publisher
from tests.model.other_database import MOVES, SETTINGS, TOPIC
from tests.model.queue_model import ORPHAN_RETENTION, RETENTION, number_of
from tests.model.sql_clients import GROUPS, OWN_CLOCK
from tests.support import refusing
from tests.support.filtering import EU, US
from tests.support.harness import USING
from tests.support.internals import Session, installing
from tests.support.sql_clients import Client
from tests.support.still_time import Time

# On servers, an example takes three times as long.
EXAMPLES = 8 if os.environ.get("DATABASE_URL", "").startswith("mysql") else 15
PROFILES = {
    "default": hypothesis_settings(max_examples=EXAMPLES, stateful_step_count=80, derandomize=True, database=None),
    "long": hypothesis_settings(
        max_examples=int(os.environ.get("MODEL_EXAMPLES", "500")), stateful_step_count=120, print_blob=True
    ),
}


QUEUE = {
    "RETENTION": RETENTION,
    "ORPHAN_RETENTION": ORPHAN_RETENTION,
    "TOPICS": SETTINGS,
    "GROUPS": GROUPS,
}


@pytest.fixture(scope="module")
def schema(_database: None) -> Iterator[None]:
    """The trigger that refuses messages and, on servers, the procedures. Creating them takes longer than most tests."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(refusing.refusing())
        if connections[USING].vendor != "sqlite":
            with override_settings(MYSQLQUEUE=QUEUE):
                installing.install(USING)
            stack.callback(installing.remove, USING)
            for statement in OWN_CLOCK:
                Session(USING).execute(statement)
        yield


@pytest.fixture
def machine(schema: None, engine: str, monkeypatch: pytest.MonkeyPatch, settings: Any, caplog: Any) -> Any:
    """The machine's class, with what its examples share."""
    settings.MYSQLQUEUE = QUEUE
    threads = [] if engine == "sqlite" else [ThreadPoolExecutor(max_workers=1) for _ in range(4)]
    publishers = [Publisher(None), *map(Publisher, threads[1:])]
    aside = threads[0] if threads else None
    caplog.set_level("CRITICAL", logger="django_mysqlqueue")
    with contextlib.ExitStack() as stack:
        client = None
        if engine != "sqlite":
            client = stack.enter_context(contextlib.closing(Client(MOVES)))
        for thread in threads:
            stack.callback(thread.shutdown)
            stack.callback(lambda thread=thread: thread.submit(connections.close_all).result(60))
        yield type(
            "TheMachine",
            (Machine,),
            {"clock": Time(monkeypatch), "publishers": publishers, "aside": aside, "client": client},
        )


# Long enough to shrink what fails.
@pytest.mark.promise("Retention", "Filters")
@pytest.mark.timeout(0 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 900)
def test_the_queue_agrees_with_its_model(machine):
    run_state_machine_as_test(
        machine,
        settings=hypothesis_settings(
            PROFILES[os.environ.get("HYPOTHESIS_PROFILE", "default")],
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def play(machine: type[Machine], *steps: tuple[str, dict[str, Any]]) -> Machine:
    """The rules in a given order, with the comparison after each, and the end."""
    state = machine()
    for name, arguments in steps:
        getattr(state, name)(**arguments)
        state.agrees_with_the_model()
    state.teardown()
    return state


@pytest.mark.parametrize("action", ["ack", "nack", "reject", "raise", "ack inside"])
@pytest.mark.parametrize("group", range(6))
def test_the_late_word_of_a_frozen_handler(machine, group, action):
    """It thaws while another is in the handler with the same message, which then ends as that one says."""
    topic = SPECS[group].ref.topic
    play(
        machine,
        ("declare", {"messages": [(topic, "x", 0, 0)] * 2, "first": 1 << group, "second": 1 << group}),
        ("step", {"who": 0, "tick": True}),
        ("step", {"who": 1, "tick": True}),
        ("freeze", {"who": 0, "busy": 1, "overtaken": True}),
        ("thaw", {"who": 0, "first": "handler", "script": [action]}),
        ("let", {"who": 0, "what": "flush", "script": []}),
        ("step", {"who": 0, "tick": True}),
        ("finish_one", {"who": 0, "which": 0, "script": ["ack"]}),
    )


@pytest.mark.parametrize("group", range(6))
def test_a_message_that_waits_is_given_up(machine, group):
    """What was claimed beside it is handled as ever."""
    ref = SPECS[group].ref
    played = play(
        machine,
        ("declare", {"messages": [(ref.topic, "x", 0, 0)] * 3, "first": 1 << group, "second": 1 << group}),
        ("all_work", {"rounds": 1, "script": ["nack later"] * 3}),
        ("let", {"who": 0, "what": "flush", "script": []}),
        ("let", {"who": 1, "what": "flush", "script": []}),
        ("operate", {"what": "give up", "which": group, "start": "earliest"}),
        ("all_work", {"rounds": 2, "script": []}),
    )
    life = played.model.lives[ref]
    assert len(life.given_up) == 1
    assert life.given_up == life.letters.keys()
    assert len(life.settled) == 3


@pytest.mark.parametrize("action", ["ack", "nack", "reject", "raise", "ack inside"])
@pytest.mark.parametrize("group", range(6))
def test_the_late_word_of_a_handler_whose_message_was_given_up(machine, group, action):
    """It was frozen until its subscriber counted as lost, and thaws after an operator has dead-lettered its message."""
    topic = SPECS[group].ref.topic
    played = play(
        machine,
        ("declare", {"messages": [(topic, "x", 0, 0)] * 2, "first": 1 << group, "second": 1 << group}),
        ("step", {"who": 0, "tick": True}),
        ("step", {"who": 1, "tick": True}),
        ("freeze", {"who": 0, "busy": 1, "overtaken": False}),
        ("freeze", {"who": 0, "busy": 1, "overtaken": False}),
        ("pass_time", {"seconds": LEASE + 1, "beats": True}),
        ("operate", {"what": "give up", "which": group, "start": "earliest"}),
        ("thaw", {"who": 0, "first": "handler", "script": [action]}),
        ("let", {"who": 0, "what": "flush", "script": []}),
        ("thaw", {"who": 0, "first": "handler", "script": [action]}),
        ("let", {"who": 1, "what": "flush", "script": []}),
        ("step", {"who": 0, "tick": True}),
    )
    assert played.model.lives[SPECS[group].ref].given_up


@pytest.mark.parametrize("group", range(6))
def test_a_handler_that_ends_its_process_every_time(machine, group):
    """The first loss is free; then its starts are on record, and count."""
    topic = SPECS[group].ref.topic
    ends = ("end_a_subscriber", {"who": 0, "how": "in a handler", "missed": True, "script": []})
    begins = ("start_a_subscriber", {"which": 1 << group, "claim_size": 10})
    play(
        machine,
        ("declare", {"messages": [(topic, "x", 0, 0)] * 2, "first": 1 << group, "second": 1 << group}),
        *[ends, begins] * 6,
    )


@pytest.mark.promise("Order")
@pytest.mark.parametrize("group", range(6))
def test_what_is_published_behind_a_message_that_was_lost_twice(machine, group):
    """In ordered mode it waits, whoever owns the partition; the other partition does not."""
    topic = SPECS[group].ref.topic
    ends = ("end_a_subscriber", {"who": 0, "how": "in a handler", "missed": True, "script": []})
    begins = ("start_a_subscriber", {"which": 1 << group, "claim_size": 10})
    work = ("all_work", {"rounds": 2, "script": []})
    play(
        machine,
        ("declare", {"messages": [(topic, "x", 0, 0)] * 2, "first": 1 << group, "second": 1 << group}),
        ("end_a_subscriber", {"who": 1, "how": "leave", "missed": False, "script": []}),
        *[ends, begins] * 2,
        ("publish", {"messages": [(topic, "x", 0, 0), (topic, "y", 0, 0)], "commit": True}),
        work,
        ("end_a_subscriber", {"who": 0, "how": "leave", "missed": False, "script": []}),
        begins,
        work,
        ("pass_time", {"seconds": LEASE + 1, "beats": True}),
        work,
    )


@pytest.mark.promise("Filters")
@pytest.mark.parametrize("how", ["register", "override"])
@pytest.mark.parametrize("first", ["poller", "handler"])
@pytest.mark.parametrize("group", range(6))
def test_a_subscriber_that_was_frozen_while_the_filter_was_changed(machine, group, first, how):
    """It has the one before in its memory, and applies it to nothing more."""
    ref = SPECS[group].ref
    us, eu, none = [(ref.topic, "x", 0, 0, region) for region in ("us", "eu", "")]
    played = play(
        machine,
        ("declare", {"messages": [us, eu], "first": 1 << group, "second": 1 << group}),
        ("end_a_subscriber", {"who": 1, "how": "leave", "missed": False, "script": []}),
        ("change_filters", {"which": 1 << group, "how": "register", "policy": EU}),
        *[("step", {"who": 0, "tick": True})] * 2,
        ("freeze", {"who": 0, "busy": 1, "overtaken": False}),
        ("change_filters", {"which": 1 << group, "how": how, "policy": US}),
        ("publish", {"messages": [us, eu, none, us], "commit": True}),
        ("sequence_a_little", {"rows": 4}),
        ("thaw", {"who": 0, "first": first, "script": []}),
        ("step", {"who": 0, "tick": False}),
        ("all_work", {"rounds": 3, "script": []}),
    )
    life = played.model.lives[ref]
    numbers = [number_of(played.model.logged[offset]) for offset in sorted(life.claimed)]
    assert numbers == [2, 3, 6]
    assert len(life.passed) == 3


@pytest.mark.promise("Debouncing", "Coalescing")
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("group", range(6))
def test_messages_that_replace_each_other(machine, group, rows):
    """Debounced ones in the outbox, then with those in the log; one is cancelled."""
    ref = SPECS[group].ref
    plain, soon, late = [(ref.topic, "x", 0, delay, "", 0, "c") for delay in (0, 5, 25)]
    played = play(
        machine,
        ("declare", {"messages": [plain, soon, late], "first": 1 << group, "second": 1 << group}),
        ("step", {"who": 0, "tick": True}),
        ("publish", {"messages": [soon, soon, late], "commit": True}),
        ("cancel_a_message", {"which": 4, "commit": True}),
        ("pass_time", {"seconds": LATER, "beats": True}),
        *[("sequence_a_little", {"rows": rows})] * 8,
        ("publish", {"messages": [plain], "commit": True}),
        ("all_work", {"rounds": 3, "script": []}),
        ("pass_time", {"seconds": LEASE + 1, "beats": True}),
        ("all_work", {"rounds": 3, "script": []}),
    )
    life = played.model.lives[ref]
    logged = [number_of(row) for row in played.model.logged.values() if row.topic == ref.topic]
    assert logged == [1, 5, 7]
    assert [number_of(played.model.logged[offset]) for offset in sorted(life.started)] == [7]


@pytest.mark.promise("Quarantine")
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_messages_that_the_log_refuses(machine, rows):
    """They are set aside, requeued and deleted; the others are handled as ever."""
    refused = {"topic": "a", "key": "x", "delay": 0, "priority": 0}
    played = play(
        machine,
        ("declare", {"messages": [("a", "x", 0, 0)], "first": 1, "second": 1}),
        *[
            step
            for what in ("publish", "publish", "publish", "requeue", "delete", "requeue")
            for step in (
                ("let_the_log_refuse", {**refused, "what": what}),
                ("publish", {"messages": [("a", "x", 0, 0), ("a", "y", 0, 0)], "commit": True}),
                *[("sequence_a_little", {"rows": rows})] * 3,
            )
        ],
        *[("all_work", {"rounds": 3, "script": []})] * 3,
    )
    assert played.model.refused == 1
    assert len(played.model.lives[SPECS[0].ref].settled) == 13


def there(what: str, rows: int = 3) -> tuple[str, dict[str, Any]]:
    return "in_the_other_database", {"what": what, "rows": rows}


THREE = {"messages": [(TOPIC, "x", 0, 0)] * 3, "commit": True}


@pytest.mark.promise("Several databases")
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_relay_that_is_killed_between_its_transactions(machine, rows, killed):
    """GC runs before the source knows what has arrived, and after it."""
    collect = ("operate", {"what": "collect", "which": 0, "start": "earliest"})
    played = play(
        machine,
        ("declare", {"messages": [(TOPIC, "x", 0, 0)] * 3, "first": 1, "second": 1}),
        ("sequence_a_little", {"rows": 4}),
        *[there("relay, killed", rows)] * killed,
        ("pass_time", {"seconds": LEASE + 1, "beats": True}),
        collect,
        there("relay", rows),
        ("pass_time", {"seconds": LEASE + 1, "beats": True}),
        collect,
        there("sequence"),
        ("publish", THREE),
        ("sequence_a_little", {"rows": 4}),
        *[there("relay", rows)] * 2,
    )
    assert len([row for row in played.model.logged.values() if row.topic == f"{TOPIC}@queue"]) == 6


@pytest.mark.promise("Moving a topic")
def test_a_group_that_moves(machine):
    """Not before it has settled what had stayed here; what follows goes to the other database."""
    played = play(
        machine,
        ("declare", {"messages": [("a", "x", 0, 0)], "first": 1, "second": 1}),
        there("stay"),
        ("publish", THREE),
        ("sequence_a_little", {"rows": 4}),
        ("publish", THREE),
        there("leave"),
        there("hand over"),
        ("sequence_a_little", {"rows": 4}),
        there("relay"),
    )
    assert MOVES in played.model.lives
    assert len(played.model.lives[MOVES].settled) == 3
    played = play(
        machine,
        ("declare", {"messages": [("a", "x", 0, 0)], "first": 1, "second": 1}),
        there("stay"),
        ("publish", THREE),
        *[("all_work", {"rounds": 2, "script": []})] * 2,
        there("leave"),
        there("hand over"),
        ("publish", THREE),
        ("sequence_a_little", {"rows": 4}),
        there("relay"),
    )
    assert MOVES not in played.model.lives


@pytest.mark.servers_only
@pytest.mark.promise("Consumers in plain SQL")
@pytest.mark.parametrize("what", ["ack", "nack", "reject", "forget"])
def test_a_client_in_plain_sql_beside_a_subscriber(machine, what):
    """Each takes what is free; the late word of a client that was overtaken changes nothing."""
    in_sql = [("in_plain_sql", {"what": one, "which": 0}) for one in ("claim", what)]
    played = play(
        machine,
        ("declare", {"messages": [("a", "x", 0, 0)], "first": 1, "second": 1}),
        there("stay"),
        ("publish", {"messages": [(TOPIC, key, 0, 0) for key in "xyxy"], "commit": True}),
        ("sequence_a_little", {"rows": 9}),
        *in_sql,
        ("step_and_work", {"who": 0, "tick": True, "times": 1, "script": ["nack"], "flush": True}),
        in_sql[0],
        ("pass_time", {"seconds": LEASE + 1, "beats": True}),
        ("step", {"who": 0, "tick": True}),
        ("take", {"who": 0, "times": 3}),
        ("take", {"who": 1, "times": 3}),
        in_sql[1],
        *[("finish_one", {"who": 0, "which": 0, "script": []})] * 2,
        ("all_work", {"rounds": 3, "script": []}),
        ("pass_time", {"seconds": LEASE + 1, "beats": True}),
        ("all_work", {"rounds": 3, "script": []}),
    )
    assert len(played.model.lives[MOVES].settled) == 4
