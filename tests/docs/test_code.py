"""Code in the documents compiles, and what it names exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

import django_mysqlqueue
from django_mysqlqueue import publish
from django_mysqlqueue.models import DeliveryState, QueueMessage
from django_mysqlqueue.options import conf
from django_mysqlqueue.options.backoff import Backoff
from tests.support.documents import DOCS, PAGES, _block, blocks, identify, parsed
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import IN_CODE, lane
from tests.support.paths import ROOT

pytestmark = pytest.mark.any_engine


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_python_compiles(page):
    for line, text in blocks(page, "python"):
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compile("\n" * (line - 1) + text, str(page), "exec", flags=flags, dont_inherit=True)


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        if module and hasattr(importlib.import_module(module), attribute):
            return True
        return bool(importlib.import_module(name))
    except ModuleNotFoundError:
        return False


def test_what_is_imported_from_the_package_exists():
    seen = 0
    for where, tree in parsed():
        for node in ast.walk(tree):
            package = (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else ""
            if package in ("django_mysqlqueue", "pyspark_mysqlqueue"):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    assert _exists(name), (where, name)
                    seen += 1
    assert seen > 20


def test_arguments_of_the_api_exist():
    known = {
        name: set(inspect.signature(getattr(django_mysqlqueue, name)).parameters)
        for name in ("publish", "publish_many", "cancel", "reschedule", "subscriber", "Message", "Backoff")
    }
    known["subscriber"] |= IN_CODE
    methods = {
        name: set(inspect.signature(method).parameters)
        for name, method in inspect.getmembers(django_mysqlqueue.Delivery, inspect.isfunction)
    }
    seen = 0
    for where, tree in parsed():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in known:
                allowed = known[node.func.id]
            elif isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "delivery":
                assert node.func.attr in methods, (where, node.func.attr)
                allowed = methods[node.func.attr]
            else:
                continue
            seen += 1
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            assert given <= allowed, (where, given - allowed)
    assert seen > 30


def test_attributes_of_a_delivery_exist(db):
    held: list[Any] = []
    publish("t", 1)
    Sub(handler(function=held.append)).settle()
    for where, tree in parsed():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "delivery":
                assert hasattr(held[0], node.attr), (where, node.attr)


def test_settings_in_examples_are_valid(settings, monkeypatch):
    seen = 0
    for alias in ("shop", "events"):
        monkeypatch.setitem(settings.DATABASES, alias, {})
    for where, tree in parsed():
        for node in ast.walk(tree):
            assigned = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MYSQLQUEUE"
            if not assigned and not (isinstance(node, ast.keyword) and node.arg == "MYSQLQUEUE"):
                continue
            given = eval(ast.unparse(node.value))  # noqa: S307
            settings.MYSQLQUEUE = dict(given)
            assert not conf.problems(), where
            seen += 1
    assert seen > 4


def test_the_json_formatter_works():
    namespace: dict[str, Any] = {}
    exec(_block("howto/observe.md", "class JSONFormatter"), namespace)  # noqa: S102
    formatter = namespace["JSONFormatter"]()
    record = logging.LogRecord("django_mysqlqueue.subscriber", logging.WARNING, "", 1, "%s %s", ("a", "b"), None)
    assert json.loads(formatter.format(record))["message"] == "a b"
    record.mysqlqueue = {"event": "delivery.failed", "group": "g", "error": ValueError("x")}
    try:
        raise ValueError("x")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    line = json.loads(formatter.format(record))
    assert line["event"] == "delivery.failed"
    assert line["error"] == "x"
    assert line["traceback"].endswith("ValueError: x")
    assert "stacks" not in line
    record.stack_info = "Thread MainThread:\n  …"
    assert json.loads(formatter.format(record))["stacks"] == record.stack_info


def test_what_sentry_gets(monkeypatch):
    """Events without an exception are an issue for each task, or for each group on a topic."""
    given: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "sentry_sdk", SimpleNamespace(init=given.update))
    namespace: dict[str, Any] = {"LOGGING": {"filters": {}, "handlers": {}, "loggers": {}}}
    exec(_block("howto/observe.md", "sentry_sdk.init"), namespace)  # noqa: S102

    def described(**fields: Any) -> Any:
        record = logging.LogRecord("django_mysqlqueue.subscriber", logging.ERROR, "", 1, "%s", ("a",), None)
        record.mysqlqueue = {"event": "delivery.dead_lettered", **fields}
        return given["before_send"]({}, {"log_record": record})

    job = described(group="jobs", topic="jobs.default", task="shop.tasks.geocode", id="1")
    assert job["fingerprint"] == ["mysqlqueue", "delivery.dead_lettered", "shop.tasks.geocode", "jobs", "jobs.default"]
    assert job["tags"]["task"] == "shop.tasks.geocode"
    other = described(group="mail", topic="orders", offset=7)
    assert other["fingerprint"] == ["mysqlqueue", "delivery.dead_lettered", "mail", "orders"]


def test_the_logging_settings_make_json_of_events(tmp_path):
    """In a process of its own: dictConfig closes the handlers that pytest has set up."""
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "logs.py").write_text(_block("howto/observe.md", "class JSONFormatter"))
    (package / "settings.py").write_text(_block("howto/observe.md", '"shop.logs.JSONFormatter"'))
    code = (
        "import logging.config; from shop.settings import LOGGING; logging.config.dictConfig(LOGGING); "
        "from django_mysqlqueue.runtime.log import event; event(logging.ERROR, 'delivery.dead_lettered', group='g')"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    line = json.loads(done.stderr)
    assert (line["event"], line["level"], line["group"]) == ("delivery.dead_lettered", "ERROR", "g")


def test_the_examples_of_publishing_run(db, clock):
    """``howto/publish.md``: cancelling, rescheduling, many messages, plain SQL."""
    found: dict[str, Any] = {"Order": None}
    exec(_block("howto/publish.md", "def open_trial"), found)  # noqa: S102
    user = SimpleNamespace(pk=7, save=lambda: None, delete=lambda: None)
    found["open_trial"](user)
    first = user.reminder
    clock.advance(20 * 86400)
    found["extend_trial"](user)
    assert user.reminder == first
    clock.advance(20 * 86400)
    sequence()
    assert not QueueMessage.objects.exists()  # extended
    clock.advance(7 * 86400)
    sequence()
    assert [message.message_id for message in QueueMessage.objects.all()] == [first]
    found["extend_trial"](user)  # it has come due
    assert user.reminder != first
    found["close_account"](user)
    clock.advance(30 * 86400)
    sequence()
    assert QueueMessage.objects.count() == 1

    exec(_block("howto/publish.md", "def remind_customers").replace("from orders.models import Order", ""), found)  # noqa: S102
    orders = [SimpleNamespace(pk=pk, email=f"{pk}@example.com") for pk in (1, 2)]
    assert found["remind_customers"](SimpleNamespace(iterator=lambda: iter(orders))) == 2
    with connections[USING].cursor() as cursor:
        if connections[USING].vendor == "sqlite":  # The examples are for servers.
            connections[USING].connection.create_function("UNIX_TIMESTAMP", 0, lambda: int(time.time()))
        for _, sql in blocks(DOCS / "howto" / "publish.md", "sql"):
            cursor.execute(sql)
    sequence()
    assert QueueMessage.objects.get(topic="orders").partition_key == "ada@example.com"
    mail = QueueMessage.objects.get(topic="mails")
    assert (mail.partition_key, mail.priority) == (lane("ada@example.com", 10), 10)
    text = QueueMessage.objects.get(topic="texts")
    assert abs(text.expires_at - text.created_at - 300_000) < 60_000
    assert QueueMessage.objects.filter(topic="reminders").count() == 3


def _commands_on_failures() -> list[list[str]]:
    return [
        shlex.split(line)[2:]
        for _, block in blocks(DOCS / "howto" / "failures.md", "sh")
        for line in block.splitlines()
        if "manage.py" in line
    ]


@pytest.mark.parametrize("way", ["command", "python"])
def test_a_message_is_given_up_as_the_page_says(db, way):
    publish("orders", 1)
    sequence()
    QueueMessage.objects.update(offset=4711, message_id="0194f0c1-7d3a-7bb1-9c55-2f6f0f0a8e21")
    Sub(handler("orders", "billing", lambda delivery: delivery.nack(3600, "no such order"))).settle()
    if way == "command":
        (command,) = [one for one in _commands_on_failures() if one[0] == "queuedeadletter"]
        call_command(*command, "--noinput", stdout=io.StringIO())
    else:
        exec(_block("howto/failures.md", "operations.dead_letter("), {})  # noqa: S102
    sequence()
    letter = QueueMessage.objects.get(topic="orders_dlq")
    assert letter.original_offset == 4711
    assert letter.last_error.startswith("Dead-lettered by ")
    assert letter.last_error.endswith(": order was deleted\n\nno such order")


def test_a_dead_letter_is_given_back_as_the_page_says(db):
    def fail(delivery):
        raise ValueError("broken")

    publish("orders", {"order": 7}, key="1", id="seven", metadata={"from": "web"})
    sub = Sub(handler("orders", "billing", fail, max_attempts=1), handler("orders", "mail"))
    sub.settle()
    sub.leave()
    commands = [one for one in _commands_on_failures() if one[0] != "queuedeadletter" and "--key" not in one]
    assert [name for name, *_ in commands[:3]] == ["queueredrive", "queueredrive", "queuediscard"]
    for command in commands[:2]:
        call_command(*command, "--noinput", stdout=io.StringIO())
    with pytest.raises(CommandError, match="No dead letters of orders_dlq match"):  # they have been redriven
        call_command(*commands[2], "--noinput", stdout=io.StringIO())
    got: list[Any] = []
    Sub(handler("orders", "billing", got.append), handler("orders", "mail", got.append)).settle()
    assert [(one.group, one.id, one.payload, one.metadata["from"]) for one in got] == [
        ("billing", "seven", {"order": 7}, "web")
    ]
    assert not QueueMessage.objects.filter(topic="orders_dlq").exists()
    for command in commands[3:]:
        call_command(*command, "--noinput", stdout=io.StringIO())
    assert lag("billing", "orders") == 2  # both come again


def test_the_messages_of_a_key_are_handled_as_the_page_says(db):
    commands = [one for one in _commands_on_failures() if "--key" in one]
    assert [name for name, *_ in commands] == ["queueredrive", "queueretry", "queuestatus"]

    def fail(delivery):
        raise ValueError("card expired")

    for options in ({"max_attempts": 1}, {"max_attempts": 9}):
        for key in ("customer-13", "customer-14"):
            publish("orders", key, key=key)
        sub = Sub(handler("orders", "billing", fail, backoff=Backoff(initial=3600, jitter=0), **options))
        sub.settle()
        sub.leave()
        sequence()
    for command in commands:
        call_command(*command, *(["--noinput"] if command[0] != "queuestatus" else []), stdout=io.StringIO())
    assert QueueMessage.objects.get(topic="orders_dlq").partition_key == "customer-14"
    assert DeliveryState.objects.get(acked=False, invisible_until=0).partition_key == "customer-13"


def test_acked_dead_letters_are_collected_as_the_page_says(settings):
    """``howto/failures.md``: a handler of a DLQ topic makes RETENTION count."""
    settings.MYSQLQUEUE = {"RETENTION": 60}
    assert conf.get_settings().retention_of("orders_dlq", has_groups=True) == 60
    assert conf.get_settings().retention_of("orders_dlq", has_groups=False) is None
    settings.MYSQLQUEUE = {"TOPICS": {"orders_dlq": {"RETENTION": None}}}
    assert conf.get_settings().retention_of("orders_dlq", has_groups=True) is None
