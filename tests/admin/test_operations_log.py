"""The dashboard's page of the audit log, and lists as CSV."""

from __future__ import annotations

import csv
import datetime
import io
import re
from html import unescape

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone, translation
from django.utils.translation import gettext, gettext_lazy

from django_mysqlqueue import operations
from django_mysqlqueue.admin import csv_export
from django_mysqlqueue.inspection import operations_log
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.inspection.operations_log import OperationFilter
from django_mysqlqueue.models import ConsumerGroup, Operation, QueueMessage
from django_mysqlqueue.operations import ACTIONS, redriving
from tests.support.dashboard import HOSTILE, ROOT, page, submitted
from tests.support.dead_letter_pages import bound
from tests.support.handlers import fail
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import DeadLetterFilter, Session, audit
from tests.support.job_pages import ended, job
from tests.support.scenarios import dead_letters, log
from tests.support.topic_permissions import OnTopics

ADDRESS = f"{ROOT}operations/"


def record(action="pause", **columns):
    """An operation in the audit log that has ended."""
    given = {"consumer_group": "g", "topic": "t", "actor": "ada", "ended_at": 1}
    return Operation.objects.create(action=action, **given | columns)


def shown(client, **query):
    """The rows of the page, as (label, arguments, what it has changed)."""
    rows = client.get(ADDRESS, query).context["rows"]
    return [(row.label, row.detail, row.changed) for row in rows]


def ids(client, **query):
    return [row.entry.id for row in client.get(ADDRESS, query).context["rows"]]


@pytest.fixture
def viewer(make_client, settings):
    """The client of a user who may view the topic t, and nothing in general."""
    settings.AUTHENTICATION_BACKENDS = ["tests.support.topic_permissions.OnTopics"]
    OnTopics.granted.clear()
    client = make_client()
    OnTopics.granted.add((User.objects.latest("pk").username, "django_mysqlqueue.view_dashboard", "t"))
    return client


def test_operations_are_shown_as_their_users_gave_them(client, settings):
    settings.TIME_ZONE = "Europe/Berlin"
    offsets = log(4)
    sub = Sub(handler("t", "g", fail, max_attempts=1))
    sub.settle()
    sequence()
    how = {"actor": "ada", "reason": "the warehouse moves"}
    noon = datetime.datetime(2100, 1, 1, 12, tzinfo=datetime.UTC)
    operations.pause("g", "t", **how)
    operations.seek("g", "t", offsets[2], **how)
    operations.seek("g", "t", "latest", **how)
    operations.seek("g", "t", time=datetime.datetime(2020, 1, 1, 12, tzinfo=datetime.UTC), **how)
    operations.settings("g", "t", {"prefetch": 5}, **how)
    dead = list(QueueMessage.objects.filter(topic="t_dlq").order_by("offset").values_list("offset", flat=True))
    operations.edit("t", {"n": 1}, offset=dead[0], **how)
    operations.redrive("t", offsets=dead[1:2], **how)
    operations.discard("t", error="ValueError", until=noon, **how)
    found = shown(client)
    assert found == [
        ("Discard dead letters", "failed until 2100-01-01 13:00:00, error contains 'ValueError'", "2 dead letters"),
        ("Redrive dead letters", f"offset {dead[1]}", "1 dead letter"),
        ("Edit and redrive", f"offset {dead[0]}", "1 dead letter"),
        ("Override options", "prefetch=5", ""),
        ("Seek", found[4][1], "0 deliveries"),
        ("Seek", found[5][1], "0 deliveries"),
        ("Seek", f"to offset {offsets[2]}", "0 deliveries"),
        ("Pause group", "", ""),
    ]
    assert re.fullmatch(r"to offset \d+ \(latest\)", found[5][1])
    assert re.fullmatch(r"to offset \d+ \(time 2020-01-01 13:00:00\)", found[4][1])
    text = page(client, "operations")
    assert text.count("the warehouse moves") == 8
    assert "T12:00" not in text


def test_every_operation_has_a_name_of_its_own_for_people():
    assert {"seek", "drop", "redrive", "discard", "cancel", "retry", "replace", "run recurring", "limits"} <= set(
        ACTIONS
    )
    assert len({str(action.label) for action in ACTIONS.values()}) == len(ACTIONS)


def test_an_operation_of_a_later_release_is_shown_by_its_own_name(client):
    record("rewind", detail="to 2026-11-26T25:00:00+00:00, 2026-11-26T10:00:00")
    assert shown(client) == [("rewind", "to 2026-11-26T25:00:00+00:00, 2026-11-26T10:00:00", "")]


def test_running_and_interrupted_operations(client):
    now = Session(USING).now()
    old = now - audit.SILENT_MS - 5000
    values = {"ended_at": 0, "changed": 120, "consumer_group": "", "topic": "t_dlq"}
    silent = record("redrive", started_at=old, progress_at=old + 1000, total=2000, **values)
    slow = record("redrive", started_at=old, progress_at=now, total=2000, **values)
    unknown = record("seek", started_at=now, **values)
    over = record("redrive", **{**values, "ended_at": now})
    answer = client.get(ADDRESS)
    rows = {row.entry.id: row for row in answer.context["rows"]}
    assert [(row.state, row.changed) for row in rows.values()] == [
        ("finished", "120 dead letters"),
        ("running", "120 deliveries"),
        ("running", "120 of 2,000 dead letters"),
        ("interrupted", "120 of 2,000 dead letters"),
    ]
    assert rows[slow.pk].took == "1 min 5 s so far"
    assert rows[silent.pk].took == "no progress for 1 min 4 s"
    text = unescape(answer.content.decode())
    assert "no progress for 1 min 4 s" in text
    assert re.findall(r'<progress class="mq-progress" max="(\d+)" value="(\d+)"', text) == [("2000", "120")]
    assert ("Running: 2" in text, "Interrupted: 1" in text) == (True, True)
    assert ids(client, state="running") == [unknown.pk, slow.pk]
    assert ids(client, state="interrupted") == [silent.pk]
    assert ids(client, state="ended") == [over.pk]
    assert "state='lost' is not one of running, interrupted, ended." in page(client, "operations", 400, state="lost")


def test_an_operation_records_progress_while_it_waits(db, monkeypatch):
    dead_letters(3, keys="a")
    monkeypatch.setattr(audit, "BEAT_SECONDS", 0.01)
    seen = []

    def rest(seconds, beat):
        Operation.objects.update(progress_at=0)
        real(max(seconds, 0.05), beat)
        seen.append(Operation.objects.get().progress_at)

    real = redriving._rest
    monkeypatch.setattr(redriving, "_rest", rest)
    assert redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor="ada", rate=1000.0, limit=2) == 2
    assert seen
    assert all(seen)
    assert Operation.objects.get().total == 2


def test_filters_and_pages(client, monkeypatch):
    monkeypatch.setattr("django_mysqlqueue.admin.pages.operations.PAGE_ROWS", 2)
    pauses = [record(consumer_group="g", topic=topic, actor=actor) for topic in ("t", "u") for actor in ("ada", "bob")]
    dead = record("redrive", consumer_group="", topic="t_dlq", actor="eve")
    one, two, _three, four = (operation.pk for operation in pauses)
    assert ids(client, topic="t", by="ada") == [one]
    assert ids(client, topic="t") == ids(client, topic="t_dlq") == [dead.pk, two]
    assert ids(client, group="g", by="bob") == [four, two]
    assert ids(client, kind="redrive") == [dead.pk]
    assert ids(client, group="none") == []
    assert "No operations match." in page(client, "operations", group="none")
    seen, address = [], ADDRESS
    while address:
        text = client.get(address).content.decode()
        seen += re.findall(r"<tr>\s*<td data-label=\"started\"", text)
        links = re.findall(r'href="([^"]*)">Next page', text)
        address = unescape(links[0]) if links else ""
    assert len(seen) == 5
    assert "before='x': must be an integer" in page(client, "operations", 400, before="x")


@pytest.mark.parametrize("column", ["consumer_group", "topic"])
def test_names_with_characters_that_inputs_lose_can_be_found(client, column):
    name = {"consumer_group": "group", "topic": "topic"}[column]
    wanted = record(**{column: "a\nb"})
    for other in ("ab", "a\\u000ab"):
        record(**{column: other})
    form = submitted(client.get(ADDRESS, {name: "a\nb"}).content.decode())
    assert ids(client, **form) == [wanted.id]


def test_a_filter_that_matches_few_is_searched_page_by_page(client, monkeypatch):
    bound(monkeypatch, operations=2)
    wanted = record(actor="eve").pk
    for _number in range(3):
        record()
    answer = client.get(ADDRESS, {"by": "eve"})
    assert list(answer.context["rows"]) == []
    text = answer.content.decode()
    assert "None of the operations that were searched match." in text
    assert "Only the next 2 operations were searched for this page." in text
    (link,) = re.findall(r'href="([^"]*)">Next page', text)
    assert [row.entry.id for row in client.get(unescape(link)).context["rows"]] == [wanted]
    assert [row["by"] for row in exported(client, by="eve")] == ["eve"]


@pytest.mark.promise("Permissions by topic")
def test_users_of_single_topics_see_the_operations_on_these(viewer, make_client):
    log(1)
    mine = [record(topic="t").pk, record("redrive", topic="t_dlq", ended_at=0).pk]
    record(topic="secret", actor="secret", reason="secret", ended_at=0)
    record("forget", topic="", consumer_group="", detail="secret")
    assert ids(viewer) == mine[::-1]
    for query in ({}, {"state": "running"}, {"by": "secret"}, {"topic": "t"}):
        answer = viewer.get(ADDRESS, query)
        assert answer.status_code == 200
        assert re.sub(r'name="by" value="secret"', "", answer.content.decode()).count("secret") == 0
        assert "Running: 1" in answer.content.decode()
        assert [row["topic"] for row in exported(viewer, **query) if row["topic"] == "secret"] == []
    refused = page(viewer, "operations", 403, topic="secret")
    assert "You may view these topics: t. Choose one of them." in refused
    assert viewer.get(ADDRESS, {"topic": "secret", "format": "csv"}).status_code == 403
    assert f'href="{ADDRESS}"' in page(viewer)
    everything = make_client("view_dashboard", "view_operation")
    assert len(ids(everything)) == 4
    nothing = make_client("view_dashboard")
    assert nothing.get(ADDRESS).status_code == 403
    assert ADDRESS not in page(nothing)


def test_texts_of_users_are_shown_as_text(client, settings):
    settings.MYSQLQUEUE = {"REDACT": "tests.admin.test_operations_log.star"}
    record(reason=HOSTILE, actor=HOSTILE, detail="error contains 'ada@example.com'", consumer_group=HOSTILE)
    text = client.get(ADDRESS).content.decode()
    assert "<script>alert" not in text
    assert "ada@example.com" not in text
    assert "error contains '*'" in unescape(text)


def star(text, *, topic, kind):
    return text.replace("ada@example.com", "*")


def test_the_number_of_statements_does_not_grow_with_operations(client):
    counts = []
    for _round in range(2):
        for _number in range(10):
            record()
        with CaptureQueriesContext(connection) as captured:
            client.get(ADDRESS, {"by": "ada"})
        counts.append(len([one for one in captured if "queue_operations" in one["sql"]]))
    assert counts == [3, 3]


# -- who has paused a group ---------------------------------------------------


def paused_by(client):
    found = client.get(f"{ROOT}group/", {"group": "g", "topic": "t"}).context["paused_by"]
    return re.sub(r"\d+ (ms|s)", "5 s", found)


def test_a_paused_group_says_who_paused_it_and_why(client):
    Sub(handler("t", "g"))
    Sub(handler("t", "h"))
    record(consumer_group="h", actor="eve", reason="another")
    assert paused_by(client) == ""
    operations.pause("g", "t", actor="ada", reason="the warehouse moves")
    operations.pause("h", "t", actor="eve", reason="another")
    assert paused_by(client) == "by ada 5 s ago: the warehouse moves"
    text = page(client, "group", group="g", topic="t")
    assert re.search(r"paused</strong> <bdi>by ada .* ago: the warehouse moves", text)
    operations.resume("g", "t", actor="bob")
    assert paused_by(client) == ""
    ConsumerGroup.objects.filter(consumer_group="g").update(paused=True)
    assert paused_by(client) == "", "paused by plain SQL"
    ConsumerGroup.objects.filter(consumer_group="g").update(paused=False)
    operations.pause("g", "t", actor="bob")
    assert paused_by(client) == "by bob 5 s ago"
    operations.seek("g", "t", "earliest", actor="eve")
    assert paused_by(client) == "by bob 5 s ago"
    # Registered again, and paused by plain SQL: who has paused its predecessor has not paused it.
    ConsumerGroup.objects.filter(consumer_group="g").update(registered_at=2**40 * 2)
    assert paused_by(client) == ""


def test_the_search_for_who_paused_a_group_is_bounded(client, monkeypatch):
    Sub(handler("t", "g"))
    operations.pause("g", "t", actor="ada")
    bound(monkeypatch, operations=2)
    for _number in range(2):
        record("resume", consumer_group="other")
    assert paused_by(client) == ""


# -- CSV ----------------------------------------------------------------------


def exported(client, name="operations", **query):
    answer = client.get(f"{ROOT}{name}/", {**query, "format": "csv"})
    assert answer.status_code == 200
    assert answer["Content-Type"] == "text/csv; charset=utf-8"
    assert answer["Content-Disposition"].startswith('attachment; filename="')
    return list(csv.DictReader(io.StringIO(b"".join(answer.streaming_content).decode("utf-8-sig"))))


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(1)", "\tx", "\r=1", "\nx", " =1", "\uff1d1"])
def test_cells_that_spreadsheets_take_for_formulas_begin_with_an_apostrophe(client, text):
    assert csv_export.cell(text) == f"'{text}"
    record(reason=text, actor=text, consumer_group=text)
    (row,) = exported(client)
    assert {row["reason"], row["by"], row["group"]} == {f"'{text}"}


def test_other_cells_are_exported_as_they_are(client):
    assert [csv_export.cell(value) for value in (-5, "a=1", "", 'x",=1', "a\nb")] == ["-5", "a=1", "", 'x",=1', "a\nb"]
    record("seek", reason='x",=1', detail="to offset 7", changed=3)
    (row,) = exported(client)
    assert (row["reason"], row["arguments"], row["changed"], row["operation"]) == ('x",=1', "to offset 7", "3", "Seek")


def test_an_export_is_bounded_and_says_so(client, monkeypatch):
    monkeypatch.setattr(csv_export, "MOST_ROWS", 3)
    for module in ("operations", "jobs", "dead_letters"):
        monkeypatch.setattr(f"django_mysqlqueue.admin.pages.{module}.ROWS_AT_ONCE", 2)
    last = "Not complete: an export has at most 3 rows and takes at most 20 seconds."
    for number in range(4):
        record()
        job(f"j{number}")
        found = exported(client)
        assert [row["started at"] for row in found[3:]] == [last][: number - 2 if number > 2 else 0]
        found = exported(client, "jobs")
        assert [row["id"] for row in found[3:]] == [last][: number - 2 if number > 2 else 0]
    dead_letters(4)
    found = exported(client, "deadletters", topic="t")
    assert len(found) == 4
    assert found[3]["dead letter"] == last
    monkeypatch.setattr(csv_export, "MOST_ROWS", 100)
    monkeypatch.setattr(csv_export, "SECONDS", -1)
    assert len(exported(client)) == 3


def test_dead_letters_and_jobs_as_csv(client, monkeypatch):
    offsets = dead_letters(3)
    found = exported(client, "deadletters", topic="t", group="g")
    assert [int(row["dead letter"]) for row in found] == offsets[::-1]
    assert {row["group"] for row in found} == {"g"}
    assert exported(client, "deadletters", topic="t", error="nothing like this") == []
    ended("s1", "SUCCESSFUL")
    ended("f1", "FAILED")
    assert [row["id"] for row in exported(client, "jobs", status="FAILED")] == ["f1"]
    assert {row["id"] for row in exported(client, "jobs")} == {"s1", "f1"}
    assert page(client, "deadletters", 400, format="csv").count("The parameter topic is required.") == 1
    assert "is not a valid date and time" in page(client, "jobs", 400, format="csv", since="soon")
    assert "format=csv" in page(client, "deadletters", topic="t")
    bound(monkeypatch, dead_letters=2)
    (*_rows, last) = exported(client, "deadletters", topic="t")
    assert last["dead letter"] == "Not complete: not all dead letters of the topic were searched."


def test_an_export_needs_the_permission_of_its_page(viewer, client, settings):
    dead_letters(1)
    record(topic="u")
    assert len(exported(viewer, "deadletters", topic="t")) == 1
    for name, topic in (("deadletters", "u"), ("operations", "u"), ("jobs", "u")):
        assert viewer.get(f"{ROOT}{name}/", {"topic": topic, "format": "csv"}).status_code == 403
    settings.MYSQLQUEUE = {"REDACT": "tests.admin.test_operations_log.star"}
    assert viewer.get(f"{ROOT}deadletters/", {"topic": "t", "error": "x", "format": "csv"}).status_code == 403


def test_a_listing_through_the_inspection(db):
    record(topic="t")
    record(topic="u")
    found = operations_log.look(Session(USING), OperationFilter(topics=[]))
    assert (found.entries, found.before) == ((), None)
    assert operations_log.count_unfinished(Session(USING), []) == (0, 0)
    assert [one.topic for one in operations_log.look(Session(USING), OperationFilter()).entries] == ["u", "t"]


def test_the_last_page_has_no_next_one(db):
    first, second = record(), record()
    for wanted in (OperationFilter(), OperationFilter(topics=["t"])):
        found = operations_log.look(Session(USING), wanted, limit=2)
        assert ([one.id for one in found.entries], found.before) == ([second.pk, first.pk], None)
        assert operations_log.look(Session(USING), wanted, limit=1).before == second.pk


def test_unfinished_operations_are_counted_among_the_newest(db):
    now = Session(USING).now()
    for at, end in ((1, 0), (now, 1), (now, 0)):
        record("seek", started_at=at, ended_at=end)
    counts = [operations_log.count_unfinished(Session(USING), None, bounds=Bounds(operations=n)) for n in (1, 2, 3)]
    assert counts == [(1, 0), (1, 0), (1, 1)]


def test_all_rows_of_an_export_are_in_the_language_and_time_zone_of_the_request():
    """The response is sent when middleware, which chose them, has ended."""

    def pages():
        for _ in range(2):
            yield [(gettext("Home"), timezone.get_current_timezone_name())]

    with translation.override("de"), timezone.override("Asia/Tokyo"):
        found = csv_export.response(csv_export.Export("x", [gettext_lazy("Home")], pages()))
    text = b"".join(found.streaming_content).decode()
    assert text.count('"Start","Asia/Tokyo"') == 2, text
    assert '"Start"\r\n' in text
