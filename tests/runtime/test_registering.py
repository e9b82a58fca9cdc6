"""The groups of handlers, as ``migrate`` registers them."""

from __future__ import annotations

import pytest

from django_mysqlqueue import subscriber
from tests.support.internals import GroupRef, Registered, registering
from tests.support.registered import handle

pytestmark = [pytest.mark.any_engine, pytest.mark.usefixtures("no_handlers")]


def test_groups_are_registered_on_the_queues_database_only(monkeypatch, settings):
    calls = []

    def register(using, ref, *, mode, start, options, check):
        calls.append((using, ref, mode, start))
        return Registered(ref, mode, 0, False)

    monkeypatch.setattr(registering.groups, "register", register)
    monkeypatch.setattr(registering.groups, "register_options", lambda using, ref, column, options, **how: False)
    subscriber("t", group="g", mode="shared", start="latest")(handle)
    subscriber("t", group="h")(handle)
    registering.register_groups("other")
    assert calls == []
    registering.register_groups("default")
    assert calls == [
        ("default", GroupRef("g", "t"), "shared", "latest"),
        ("default", GroupRef("h", "t"), "ordered", "earliest"),
    ]
    calls.clear()
    settings.MYSQLQUEUE = {"DATABASE": "other"}
    registering.register_groups("default")
    assert calls == []
    registering.register_groups("other")
    assert [(using, ref.group) for using, ref, *_ in calls] == [("other", "g"), ("other", "h")]


def test_a_mode_that_differs_from_the_registered_one_is_said(monkeypatch, caplog):
    """Migrate goes on; the text says which command mends it."""
    monkeypatch.setattr(
        registering.groups,
        "register",
        lambda using, ref, **options: Registered(ref, "shared", 0, False),
    )
    subscriber("t", group="g")(handle)
    registering.register_groups("default")
    assert "registered as shared" in caplog.text
    assert "registered.handle has mode='ordered'" in caplog.text
    assert "manage.py queuegroupmode g t ordered" in caplog.text
