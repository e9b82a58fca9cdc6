"""What a team meets on its first day: a flushed database, a wrong handler, a step left out."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from django.core import checks
from django.core.management import CommandError, call_command
from django.db import connection

from django_mysqlqueue import InvalidMessage, Message, SubscriberError, publish, subscriber
from django_mysqlqueue.models import ConsumerGroup
from tests.app.models import Effect
from tests.support.harness import Sub, handler, lag
from tests.support.internals import handlers, registry
from tests.support.paths import ROOT


def test_flush_as_after_every_transaction_test_case(db):
    """Its post_migrate comes without ``apps``; the queue goes on with its groups registered anew."""
    publish("t", 1)
    call_command("flush", interactive=False, verbosity=0)
    assert {"plain", "atomic", "shared", "action"} <= set(
        ConsumerGroup.objects.values_list("consumer_group", flat=True)
    )
    publish("t", 2)
    got = []
    Sub(handler(function=lambda delivery: got.append(delivery.payload))).settle()
    assert got == [2]
    assert lag() == 0


def test_a_class_is_no_handler(no_handlers):
    """It would be instantiated with the delivery and acked, its work never done."""
    with pytest.raises(SubscriberError, match="is a class"):

        @subscriber("t", group="g")
        class Handler:
            def __init__(self, delivery):
                pass

    assert not handlers()


@pytest.mark.parametrize("function", [lambda: None, lambda a, b: None, lambda delivery, *, option: None])
def test_a_handler_that_cannot_take_a_delivery_is_refused(no_handlers, function):
    """At run time it would send the whole stream to the DLQ."""
    with pytest.raises(SubscriberError, match="is called with one argument"):
        subscriber("t", group="g")(function)


@pytest.mark.parametrize(
    "function", [lambda delivery: None, lambda *args: None, lambda delivery, option=1: None, print]
)
def test_a_handler_that_can_take_a_delivery_is_accepted(no_handlers, function):
    assert subscriber("t", group="g")(function) is function


def test_check_reports_handlers_declared_twice(no_handlers):
    for number in range(2):
        exec(f"def handle(delivery): return {number}", namespace := {"__name__": f"app{number}.subscribers"})  # noqa: S102
        subscriber("t", group="g")(namespace["handle"])
    found = [message for message in checks.run_checks() if message.id == "django_mysqlqueue.E008"]
    assert len(found) == 1
    assert "Two handlers are declared for the group 'g' on 't'" in found[0].msg


def test_check_warns_of_settings_for_a_group_without_handler(settings, no_handlers):
    subscriber("t", group="mail")(lambda delivery: None)
    settings.MYSQLQUEUE = {"GROUPS": {"mial": {"MAX_ATTEMPTS": 1}}}
    found = [message for message in checks.run_checks() if message.id == "django_mysqlqueue.W009"]
    assert "'mial'" in found[0].msg
    assert "mail" in found[0].hint


@pytest.mark.parametrize("batches", [(), (False,), (False, False), (True,), (True, False)])
def test_check_warns_of_a_batch_size_without_a_batch_handler(settings, no_handlers, batches):
    """A group may read several topics, in batches or not."""
    for number, batch in enumerate(batches):
        subscriber(f"t{number}", group="g", batch=batch)(lambda delivery: None)
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"BATCH_SIZE": 1}}} if batches else {"CLAIM_SIZE": 1}
    found = [message for message in checks.run_checks() if message.id == "django_mysqlqueue.W009"]
    assert [("'BATCH_SIZE'] has no effect" in one.msg, "batch=True" in one.hint) for one in found] == (
        [] if not batches or any(batches) else [(True, True)]
    )


@pytest.mark.parametrize(
    "command",
    [["queuestatus"], ["queuegc"], ["queuesequence"], ["queuedropgroup", "g", "t"], ["runsubscriber", "--drain"]],
)
def test_before_migrate_commands_say_what_to_do(monkeypatch, db, command):
    # Of each connection: subscribers open their own.
    introspection = type(connection.introspection)
    monkeypatch.setattr(introspection, "table_names", lambda self, cursor=None: ["auth_user"])
    with pytest.raises(CommandError, match=r"'default' does not have the queue's tables\. Run manage\.py migrate\."):
        call_command(*command)


def test_dropping_a_group_with_nobody_to_ask(db, monkeypatch):
    Sub(handler())
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(CommandError, match="--noinput"):
        call_command("queuedropgroup", "g", "t")
    assert ConsumerGroup.objects.filter(consumer_group="g").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"payload": 1, "using": "defalt"}, "using 'defalt': there is no such database"),
        ({"payload": 1, "on_mismatch": "commit"}, "on_mismatch='commit': must be"),
        ({"payload": Message(1)}, "publish_many"),
        ({"payload": 1, "delay": "5"}, r"delay '5': .* \(36600 days\)"),
    ],
)
def test_wrong_arguments_are_named(db, arguments, text):
    with pytest.raises(InvalidMessage, match=text):
        publish("t", **arguments)


TESTS_AS_PRINTED = """
import signal
from django.core.management import call_command
from django.test import TestCase, TransactionTestCase
from django_mysqlqueue import publish
from django_mysqlqueue.models import OutboxMessage
from tests.app.models import Effect

class Publishing(TestCase):
    def test_it(self):
        publish("orders", {"order": 7}, key="1")
        message = OutboxMessage.objects.get(topic="orders")
        assert bytes(message.payload) == b'{"order":7}'

class WholeWay(TransactionTestCase):
    def test_it(self):
        before = signal.getsignal(signal.SIGINT)
        publish("p.plain", {"n": 7}, key="1")
        call_command("runsubscriber", drain=True, group=["plain"])
        assert Effect.objects.get().value == 7
        assert signal.getsignal(signal.SIGINT) is before
"""


def test_a_project_tests_its_code_as_the_reference_says(db, tmp_path):
    # Several suites may run in one checkout at the same time.
    module = ROOT / "tests" / "app" / f"tests_as_printed_{os.getpid()}.py"
    module.write_text(TESTS_AS_PRINTED)
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    if connection.vendor == "mysql":  # a test database of its own
        name = connection.settings_dict["NAME"]
        env["DATABASE_URL"] = urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{name}_printed").geturl()
    else:
        env["TEST_SQLITE_FILE"] = str(tmp_path / "printed.sqlite3")
    try:
        done = subprocess.run(
            [sys.executable, "manage.py", "test", "tests.app", "-p", module.name, "--noinput"],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
        )
    finally:
        module.unlink()
    assert done.returncode == 0, done.stderr
    assert "Ran 2 tests" in done.stderr


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (
            {"order": {"lines": [1, {"what": object()}]}},
            "payload['order']['lines'][1]['what'] of type object cannot be",
        ),
        ([1, float("nan")], "payload[1] of type float cannot be written as JSON"),
        ({"effect": Effect(name="x")}, "payload['effect'] of type Effect cannot be written as JSON"),
        ({("a", 1): 2}, "payload[('a', 1)] of type int cannot be written"),
        (object(), "payload of type object cannot be written"),
    ],
)
def test_the_part_of_a_payload_that_is_no_json_is_named(db, payload, text):
    with pytest.raises(InvalidMessage) as raised:
        publish("t", payload)
    assert text in str(raised.value)
    assert ("publish its pk instead" in str(raised.value)) is ("effect" in text)


def test_a_handlers_name_has_no_memory_address(no_handlers):
    class Handler:
        def __call__(self, delivery):
            pass

    subscriber("t", group="one")(Handler())
    subscriber("t", group="two")(functools.partial(lambda extra, delivery: None, 1))
    names = sorted(one.where for one in registry.handlers().values())
    assert all(" at 0x" not in name for name in names), names
    assert any(name.endswith("Handler()") for name in names)
    assert any(name.startswith("partial(") for name in names)
