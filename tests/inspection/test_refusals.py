"""Subscribers that refuse to start leave a record, which is shown until one starts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket

import pytest
from django.core import checks as django_checks
from django.core.management import CommandError, call_command
from django.db import connection

from django_mysqlqueue import publish, subscriber
from django_mysqlqueue.inspection import check_health, find_causes, find_problems, get_overview
from django_mysqlqueue.inspection.bounds import PAGES
from django_mysqlqueue.inspection.causes import status_of
from django_mysqlqueue.inspection.subscribers import read_refusals
from django_mysqlqueue.management import refusals
from django_mysqlqueue.models import SubscriberHeartbeat
from django_mysqlqueue.operations import forget
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, Session, __version__, groups, heartbeats, registry

G, H = GroupRef("g", "t"), GroupRef("h", "u")
HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def _declared(db, no_handlers):
    subscriber("t", group="g")(lambda delivery: None)


def refuse(*arguments, match=None, **options):
    with pytest.raises((CommandError, SyntaxError), match=match):
        call_command("runsubscriber", "--drain", *arguments, **options)


def changed_mode():
    """A rollout has changed the mode: the group is registered with the old one."""
    groups.register(USING, G, mode="shared", start="earliest")
    refuse(match="registered as shared")


def found():
    return [one for one in find_problems() if one.kind == "refused"]


def starts(ref=G, **options):
    heartbeats.beat(USING, "s:1:0", [ref], {"host": "h", "version": "9"}, **options)


def later(seconds=10):
    """The record is as old as if so much time had passed."""
    for row in SubscriberHeartbeat.objects.filter(consumer_group=""):
        SubscriberHeartbeat.objects.filter(subscriber_name=row.subscriber_name).update(
            heartbeat_at=row.heartbeat_at - seconds * 1000, deregistered_at=row.deregistered_at - seconds * 1000
        )


# -- what leaves a record ----------------------------------------------------------


def test_a_mode_that_was_changed():
    changed_mode()
    (one,) = found()
    assert one.severity == 0
    assert one.text.startswith(f"A subscriber of release {__version__} refused to start, on host {HOST} ")
    assert "ago: The group 'g' on 't' is registered as shared, but " in one.text
    assert one.text.endswith("manage.py queuegroupmode g t ordered.")
    (record,) = read_refusals(Session(USING))
    assert (record.host, record.version, record.refs) == (HOST, __version__, {G})


def test_a_schema_that_is_older_than_the_code(settings):
    settings.MIGRATION_MODULES = {"django_mysqlqueue": "tests.upgrades.migrations"}
    refuse(match="Missing migrations: 9999_later")
    settings.MIGRATION_MODULES = {}
    (one,) = found()
    assert "are older than this code. Missing migrations: 9999_later. Run manage.py migrate." in one.text


@pytest.mark.parametrize("color", [True, False])
def test_a_failing_check(color):
    """Of the queue or of the project, on one line and without colors."""

    def check(**kwargs):
        return [django_checks.Error("The cache is\nnot configured.", id="shop.E001")]

    django_checks.register(check, "shop")
    try:
        refuse(match="E001", skip_checks=False, force_color=color)
    finally:
        django_checks.registry.registry.registered_checks.discard(check)
    (one,) = found()
    assert "ERRORS: ?: (shop.E001) The cache is not configured." in one.text
    assert "\x1b" not in one.text


@pytest.mark.parametrize("value", [{"THREADS": 0}, {"THREADS": 0, "DATABASE": USING}])
def test_an_invalid_setting(settings, value):
    settings.MYSQLQUEUE = value
    refuse(match="THREADS", skip_checks=False)
    settings.MYSQLQUEUE = {}
    (one,) = found()
    assert "MYSQLQUEUE['THREADS'] = 0" in one.text


def test_a_module_that_cannot_be_imported(monkeypatch):
    def fail():
        raise SyntaxError("invalid syntax")

    monkeypatch.setattr(registry, "discover", fail)
    refuse(match="invalid syntax")
    monkeypatch.undo()
    (one,) = found()
    assert one.text.endswith("ago: SyntaxError: invalid syntax.")
    assert read_refusals(Session(USING))[0].refs == frozenset()


def test_a_process_that_is_started_again_and_again_keeps_one_record():
    changed_mode()
    later()
    before = SubscriberHeartbeat.objects.get().heartbeat_at
    refuse()
    assert SubscriberHeartbeat.objects.get().heartbeat_at > before
    refuse("--name", "other")
    assert SubscriberHeartbeat.objects.count() == 2
    assert [one.text[:2] for one in found()] == ["2 "], "the same reason is one problem"


def test_a_database_that_cannot_be_written_does_not_hide_the_reason(monkeypatch):
    def fail(*args):
        raise connection.Database.OperationalError("read-only")

    monkeypatch.setattr(refusals.heartbeats, "refuse", fail)
    changed_mode()
    assert found() == []


def test_a_process_that_has_started_leaves_none(settings):
    settings.MYSQLQUEUE = {"POLL_INTERVAL": 0.05}
    call_command("runsubscriber", "--drain", verbosity=0)
    assert not SubscriberHeartbeat.objects.filter(consumer_group="").exists()


def test_it_is_deleted_after_a_day():
    changed_mode()
    later(86_401)
    assert heartbeats.forget_old(USING) == 1
    assert found() == []


# -- until one starts ---------------------------------------------------------------


def test_it_is_shown_until_a_subscriber_of_the_group_starts():
    starts()
    changed_mode()
    later(-1)
    (one,) = found()
    assert one.severity == 1, "the subscriber of the earlier release still works"
    starts(H)
    assert len(found()) == 1, "a subscriber of another group does not replace it"
    later(11)
    heartbeats.forget(USING, "s:1:0", [G])
    starts()
    assert found() == []
    heartbeats.deregister(USING, "s:1:0", [G])
    assert found() == [], "it has started, and stopped since"


def test_if_its_groups_are_not_known_any_start_counts(monkeypatch):
    monkeypatch.setattr(registry, "discover", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call_command("runsubscriber", "--drain")
    monkeypatch.undo()
    later()
    (one,) = found()
    assert one.severity == 0
    starts(H)
    assert found() == []


def test_an_operator_forgets_it():
    changed_mode()
    (record,) = read_refusals(Session(USING))
    assert forget(record.name, actor="ada").changed == 1
    assert found() == []


# -- where it is shown ----------------------------------------------------------------


def test_health_and_status_have_it(capsys):
    changed_mode()
    assert [one.kind for one in check_health().findings] == ["refused"]
    with pytest.raises(SystemExit):
        call_command("queuehealth")
    out = capsys.readouterr().out
    assert f"PROBLEM  A subscriber of release {__version__} refused to start, on host {HOST}" in out
    assert "Correct what the reason names, then start it again." in out
    call_command("queuestatus")
    assert "refused to start" in capsys.readouterr().out
    with contextlib.suppress(SystemExit):
        call_command("queuehealth", "--format", "json")
    facts = json.loads(capsys.readouterr().out)
    assert "refused" in {one["kind"] for one in facts["problems"]}


def test_each_reason_is_a_cause_of_its_own():
    changed_mode()
    refuse("--group", "nobody", match="no handler has this group")
    causes = [one for one in find_causes() if one.kind == "refused"]
    assert len(causes) == 2
    assert any("no handler has this group" in one.text for one in causes)


def test_with_subscribers_of_the_earlier_release_the_queue_is_degraded_not_stopped():
    publish("t", 1)
    sequence()
    groups.register(USING, G, mode="shared", start="earliest")
    sub = Sub(handler("t", "g", mode="shared"))
    sub.settle()
    starts()
    refuse(match="registered as shared")
    later(-1)
    overview = get_overview()
    status = status_of(overview, find_causes(overview))
    assert status.state == "degraded"
    sub.leave()


def test_an_overview_of_some_groups_is_without_it():
    changed_mode()
    assert [one.kind for one in find_problems(get_overview(group="g"))] == ["mode"]


# -- how urgent it is -------------------------------------------------------------------


def leave(*refs, reason="The tables are older than the code."):
    refusals.record({USING: refs}, "pod", CommandError(reason))


def serve(*refs):
    """Subscribers of the earlier release work for these groups, and have for long."""
    for ref in refs:
        groups.register(USING, ref, mode="ordered", start="earliest")
        starts(ref)
    SubscriberHeartbeat.objects.exclude(consumer_group="").update(info={"host": "h", "version": "9", "started_at": 1})


def severity(overview=None):
    (one,) = [one for one in find_problems(overview or get_overview()) if one.kind == "refused"]
    return one.severity


def test_a_group_that_a_rollout_adds_misses_nothing_yet():
    """It is not registered: the subscribers of the earlier release work for all that are."""
    new = GroupRef("new", "n")
    groups.register(USING, G, mode="ordered", start="earliest")
    leave(G, new)
    assert severity() == 0, "nobody works for g"
    serve(G)
    assert severity() == 1
    groups.register(USING, new, mode="ordered", start="earliest")
    assert severity() == 0, "nobody works for the new one"


def test_only_new_groups_are_urgent_if_no_subscriber_runs():
    groups.register(USING, G, mode="ordered", start="earliest")
    leave(GroupRef("new", "n"))
    assert severity() == 0, "as at the first deployment"
    serve(G)
    assert severity() == 1


def test_groups_beyond_those_that_are_read_are_not_missed():
    serve(G, H)
    leave(G, H)
    few = get_overview(bounds=dataclasses.replace(PAGES, groups=1))
    assert few.more_groups
    assert severity(few) == 1


def test_a_mistyped_option_that_is_not_repeated_is_soon_for_information():
    serve(G)
    refuse("--group", "bilings", match="no handler has this group")
    assert severity() == 1
    later(590)
    assert severity() == 1
    later(11)
    assert severity() == 2
    overview = get_overview()
    assert status_of(overview, find_causes(overview)).state == "ok"
    refuse("--group", "bilings")
    assert severity() == 1, "something starts it again and again"
    later(601)
    heartbeats.deregister(USING, "s:1:0", [G])
    assert severity() == 0, "nobody works"


def test_a_refusal_of_known_groups_stays_a_problem():
    serve(G)
    leave(G)
    later(7200)
    assert severity() == 1
    leave()
    later(1)
    assert severity() == 1, "the same reason is one problem"
