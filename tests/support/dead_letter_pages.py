"""Dead letters, and the dashboard's pages of them."""

from __future__ import annotations

from html import unescape

from django_mysqlqueue import publish
from django_mysqlqueue.admin.operations import dead_letters as operations
from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.inspection.bounds import Bounds
from tests.support.dashboard import ROOT
from tests.support.handlers import Recorder
from tests.support.harness import Sub, handler, sequence
from tests.support.scenarios import offsets_of


def listed(client, **query):
    return client.get(f"{ROOT}deadletters/", query).context


def offsets(context):
    return [row.offset for row, _error in context.get("rows", [])]


def bound(monkeypatch, **bounds):
    """The pages, and the operations on what they list, read no more than that."""
    for reader in (Page, operations.DeadLettersOperation):
        monkeypatch.setattr(reader, "bounds", Bounds(**bounds))


def ask(client, name, **values):
    """The page that asks, as text."""
    answer = client.post(f"{ROOT}do/{name}/", {**values, "asked": "yes"})
    assert answer.status_code == 200
    return unescape(answer.content.decode())


def fail_with(payload, error, *, group="g", topic="t", **options):
    """One dead letter whose handler said ``error``; returns its offset."""

    def function(delivery):
        raise ValueError(error)

    publish(topic, payload, **options)
    sub = Sub(handler(topic, group, function, max_attempts=1))
    sub.settle()
    sub.leave()
    sequence()
    return offsets_of(f"{topic}_dlq")[-1]


def star(text, *, topic, kind):
    assert topic == "t"
    assert kind in ("payload", "metadata", "error")
    return text.replace("4711", "****")


def redriven(group="g", topic="t"):
    got = Recorder()
    Sub(handler(topic, group, got)).settle()
    return sorted(got.payloads)
