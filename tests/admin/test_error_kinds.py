"""The page of errors, and the operations on those of a kind: numbers, ids and addresses are masked."""

from __future__ import annotations

import re
from html import unescape

import pytest
from django.db.models import F

from django_mysqlqueue import publish
from django_mysqlqueue.admin.operations import OPERATIONS
from django_mysqlqueue.admin.operations import errors as operations
from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.models import DeliveryEvent, DeliveryState, Operation, QueueMessage
from tests.support.dashboard import HOSTILE, ROOT, WAITS, confirm, page
from tests.support.dead_letter_pages import ask, bound, fail_with, listed, offsets
from tests.support.harness import Sub, handler, sequence
from tests.support.scenarios import offsets_of

pytestmark = pytest.mark.usefixtures("db")

FILTER = "error contains 'ValueError: no <number>' apart from numbers, ids and addresses"
OF_KIND = {"group": "g", "topic": "t", "kind": "ValueError: no <number>", "upto": 10**9}


def errors(client, **query):
    answer = client.get(f"{ROOT}deadletters/", query)
    assert answer.status_code == 200, answer.content.decode()
    return answer.context["kinds"]


def told(client, **query):
    """Of each kind on the page: group, error, retrying messages, dead letters, failed attempts."""
    return [
        (kind.ref.group, kind.text, str(kind.retrying), str(kind.dead_letters), str(kind.attempts))
        for kind in (row.kind for row in errors(client, **query).rows)
    ]


def waiting(*texts, group="g", topic="t", attempts=1):
    """Messages that fail with these texts, and wait for another attempt."""

    def function(delivery):
        raise ValueError(delivery.payload)

    for text in texts:
        publish(topic, text)
    for _attempt in range(attempts):
        DeliveryState.objects.filter(acked=False).update(invisible_until=1)
        sub = Sub(handler(topic, group, function, max_attempts=9, backoff=WAITS))
        sub.settle()
        sub.leave()
    return offsets_of(topic)[-len(texts) :]


def test_a_kind_counts_what_waits_what_is_dead_and_all_failed_attempts(client):
    first = fail_with(1, "no customer 1")
    second = fail_with(2, "no customer 22")
    other = fail_with(3, "another")
    retrying = waiting("no customer 3", "no customer 4", attempts=2)
    assert told(client) == [
        ("g", "ValueError: no customer <number>", "2", "2", "6"),
        ("g", "ValueError: another", "0", "1", "1"),
    ]
    (row, _other) = errors(client).rows
    assert (row.kind.offset, row.kind.dead_letter) == (retrying[-1], second)
    assert sum(row.kind.by_hour) == 6
    assert 'aria-label="6 in the last 24 hours"' in row.trend
    text = page(client, "deadletters")
    assert f'href="{ROOT}message/?offset={retrying[-1]}" aria-label="Show a retrying message' in text
    assert f'href="{ROOT}deadletter/?offset={second}" aria-label="Show a dead letter' in text
    links = [link for link in re.findall(r'href="([^"]*/do/[^"]*kind=[^"]*)"', text) if "customer" in link]
    names = [link.split("/do/")[1].split("/")[0] for link in links]
    assert names == ["retry-error", "dead-letter-error", "redrive", "discard"]
    asked = [unescape(client.get(link).content.decode()) for link in links]
    assert all(re.search(r": 2\.", one) for one in asked)
    assert offsets(listed(client, kind=row.kind.text)) == [second, first]
    assert other not in offsets(listed(client, kind=row.kind.text))


def test_times_are_those_of_the_attempts(client):
    first, _second = fail_with(1, "no 1"), fail_with(2, "no 2")
    day = 86_400_000
    letter = QueueMessage.objects.get(offset=first)
    QueueMessage.objects.filter(offset=first).update(failed_at=F("failed_at") - 2 * day)
    assert DeliveryEvent.objects.filter(related_id=letter.message_id).delete()[0] == 1, "as when records are collected"
    (row,) = errors(client).rows
    assert ">2 d ago<span" in page(client, "deadletters")
    assert row.kind.last_at - row.kind.first_at > day
    assert str(row.kind.attempts) == "1", "in the last 24 hours"


def test_a_failure_that_was_made_good_is_settled_and_old_ones_are_not_listed(client):
    waiting("no 1")
    DeliveryState.objects.update(invisible_until=1)
    Sub(handler()).settle()
    assert told(client) == [("g", "ValueError: no <number>", "0", "0", "1")]
    (row,) = errors(client).rows
    assert row.kind.states == ("settled",)
    text = page(client, "deadletters")
    assert f'href="{ROOT}message/?offset={row.kind.offset}" aria-label="Show a message that failed' in text
    assert "/do/" not in text
    DeliveryEvent.objects.update(settled_at=F("settled_at") - 25 * 3_600_000)
    assert told(client) == []
    assert "no attempt failed in the last 24 hours" in page(client, "deadletters")


def test_attempts_are_counted_in_their_hour(client):
    waiting("no 1", "no 2", "no 3")
    hour = 3_600_000
    for offset, ago in zip(offsets_of(), (-hour, 2 * hour, 23 * hour), strict=True):  # -hour: another server's clock
        DeliveryEvent.objects.filter(message_offset=offset).update(settled_at=F("settled_at") - ago)
    DeliveryState.objects.all().delete()
    (row,) = errors(client).rows
    assert {place: number for place, number in enumerate(row.kind.by_hour) if number} == {0: 1, 21: 1, 23: 1}


def test_filters(client):
    fail_with(1, "no 1")
    fail_with(2, "gone", group="h", topic="u")
    waiting("late", group="h", topic="u")
    assert {one[:2] for one in told(client)} == {
        ("g", "ValueError: no <number>"),
        ("h", "ValueError: gone"),
        ("h", "ValueError: late"),
    }
    for query, expected in (
        ({"topic": "u"}, {"gone", "late"}),
        ({"topic": "u_dlq"}, {"gone", "late"}),
        ({"group": "g"}, {"no <number>"}),
        ({"group": "g", "topic": "u"}, set()),
        ({"state": "retrying"}, {"late"}),
        ({"state": "dead_letters"}, {"gone", "no <number>"}),
        ({"state": "settled"}, set()),
        ({"class": "ValueError", "group": "h"}, {"gone", "late"}),
        ({"class": "KeyError"}, set()),
    ):
        assert {one[1].removeprefix("ValueError: ") for one in told(client, **query)} == expected, query
        if not expected:
            assert "No errors match." in page(client, "deadletters", **query)
    assert errors(client).classes == [("ValueError", "ValueError")]
    assert client.get(f"{ROOT}deadletters/", {"state": "x"}).status_code == 400


def test_messages_of_a_kind_are_retried_now(client):
    one, two, other = waiting("no 1", "no 2", "another")
    kind = "ValueError: no <number>"
    (said,) = confirm(client, "retry-error", group="g", topic="t", kind=kind, upto=10**9)
    assert said == "Messages of the group g/t that are due now: 2."
    due = dict(DeliveryState.objects.values_list("message_offset", "invisible_until"))
    assert (due[one], due[two]) == (0, 0)
    assert due[other] > 0
    record = Operation.objects.get()
    assert (record.detail, record.changed) == (FILTER, 2)
    assert "No messages of the group g/t are waiting" in ask(client, "retry-error", **OF_KIND)


def test_messages_of_a_kind_are_dead_lettered_now(client):
    waiting("no 1", "no 2", "another")
    (said,) = confirm(client, "dead-letter-error", **OF_KIND)
    assert Operation.objects.get().detail == FILTER
    assert said == "Messages dead-lettered to t_dlq: 2."
    sequence()
    assert len(offsets_of("t_dlq")) == 2
    assert told(client, state="retrying") == [("g", "ValueError: another", "1", "0", "1")]
    text = ask(client, "dead-letter-error", **OF_KIND)
    assert "No retrying message has this error." in text


@pytest.mark.parametrize("name", ["retry-error", "dead-letter-error"])
def test_an_operation_on_retrying_messages_is_bounded(client, monkeypatch, name):
    waiting(*(f"no {number}" for number in range(4)))
    monkeypatch.setattr(OPERATIONS[name], "most", 2)
    given = OF_KIND
    monkeypatch.setattr(operations.ErrorOperation, "bounds", Bounds(errors=2))
    assert "Remaining: possibly more. Repeat the operation" in ask(client, name, **given)
    monkeypatch.setattr(operations.ErrorOperation, "bounds", Bounds(errors=3))
    text = ask(client, name, **given)
    assert "One request changes the oldest 2. Remaining: 1 or more. Repeat the operation for these." in text
    (said,) = confirm(client, name, **given)
    assert ": 2. One request" in said
    assert Operation.objects.get().changed == 2


@pytest.mark.parametrize("name", ["retry-error", "dead-letter-error"])
def test_what_was_settled_since_it_was_read_is_left_out(client, monkeypatch, name):
    (settled,) = waiting("no 1")
    DeliveryState.objects.update(invisible_until=1)
    sub = Sub(handler())
    sub.settle()
    sub.leave()
    found = [settled, *waiting("no 2")]
    monkeypatch.setattr(operations.error_kinds, "retrying_of_kind", lambda *given, **how: (found, True))
    (said,) = confirm(client, name, **OF_KIND)
    assert ": 1." in said
    assert Operation.objects.get().changed == 1


@pytest.mark.parametrize("name", ["retry-error", "dead-letter-error"])
def test_messages_that_are_newer_than_the_page_are_not_changed(client, name):
    waiting("no 1")
    (link,) = re.findall(rf'href="([^"]*/do/{name}/[^"]*)"', page(client, "deadletters"))
    waiting("no 2")
    assert ": 1." in unescape(client.get(unescape(link)).content.decode())
    upto = int(re.search(r"upto=(\d+)", link)[1])
    (said,) = confirm(client, name, **OF_KIND | {"upto": upto})
    assert ": 1." in said
    assert Operation.objects.get().changed == 1


def test_what_was_not_read_is_possibly_more(client, monkeypatch):
    waiting(*(f"no {number}" for number in range(4)))
    given = OF_KIND
    assert "Remaining:" not in ask(client, "retry-error", **given)
    monkeypatch.setattr(operations.ErrorOperation, "bounds", Bounds(errors=3))
    assert "Remaining: possibly more." in ask(client, "retry-error", **given)


def test_counts_that_stop_at_a_bound_say_so(client, monkeypatch):
    waiting(*(f"no {number}" for number in range(4)))
    for number in range(4):
        fail_with(number, f"no {number}", group="h", topic="u", key="k")
    monkeypatch.setattr(Page, "bounds", Bounds(errors=4, dead_letters=3))
    assert told(client) == [
        ("g", "ValueError: no <number>", "4", "0", "4+"),
        ("h", "ValueError: no <number>", "0", "3+", "4+"),
    ]
    assert "A count with + is a lower bound." in page(client, "deadletters")


def test_an_operation_on_dead_letters_of_a_kind_is_bounded_and_names_no_command(client, monkeypatch):
    for number in range(3):
        fail_with(number, f"no {number}")
    bound(monkeypatch, errors=2)
    text = ask(client, "redrive", topic="t_dlq", kind="ValueError: no <number>", upto=10**9)
    assert "Repeat the operation for these." in text
    assert "manage.py" not in text
    assert len(offsets(listed(client, kind="ValueError: no <number>"))) == 2
    assert "There are no such dead letters." in ask(client, "redrive", topic="t_dlq", kind="other", upto=10**9)


def test_kinds_are_of_redacted_texts(make_client, settings):
    """So the filter by kind reveals nothing, and needs no permission to view payloads."""
    fail_with(1, "card of ada@example.com")
    fail_with(2, "card of eve")
    waiting("card of bob")
    settings.MYSQLQUEUE = {"REDACT": "tests.admin.test_error_kinds.hide"}
    client = make_client("view_dashboard", "operate_dashboard")
    assert told(client) == [("g", "ValueError: card of *", "1", "2", "3")]
    assert offsets(listed(client, kind="ValueError: card of eve")) == []
    assert len(offsets(listed(client, kind="ValueError: card of *"))) == 2
    given = {"group": "g", "topic": "t", "upto": 10**9}
    assert "No retrying message has this error." in ask(client, "retry-error", **given, kind="ValueError: card of bob")
    assert ": 1." in ask(client, "retry-error", **given, kind="ValueError: card of *")


def hide(text, *, topic, kind):
    return re.sub("of .*", "of *", text)


def test_who_may_only_view_is_offered_no_operations(make_client):
    fail_with(1, "no 1")
    waiting("no 2")
    assert "/do/" not in page(make_client("view_dashboard"), "deadletters")


def test_messages_of_a_dlq_topic_cannot_be_dead_lettered(client):
    fail_with(1, "no 1")

    def function(delivery):
        raise KeyError("alarm")

    Sub(handler("t_dlq", "alarm", function, max_attempts=9, backoff=WAITS)).settle()
    text = page(client, "deadletters", group="alarm")
    assert "do/retry-error/" in text
    assert "do/dead-letter-error/" not in text


def test_groups_whose_failures_are_not_recorded_are_named(client, settings):
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"RECORD_DELIVERIES": "none"}}}
    waiting("no 1", attempts=3)
    assert told(client) == [("g", "ValueError: no <number>", "1", "0", "1+")]
    assert "Failed attempts of these groups are not recorded" in page(client, "deadletters")


def test_errors_are_shown_as_text(client):
    fail_with(1, HOSTILE)
    waiting(HOSTILE)
    assert "<script>alert" not in client.get(f"{ROOT}deadletters/").content.decode()


def test_errors_without_a_text_are_a_kind(client):
    """Its lists and operations contain no other errors."""

    def reject(delivery):
        delivery.reject("")

    def nack(delivery):
        delivery.nack(3600)

    other = fail_with(0, "no 1")
    for function in (reject, nack):
        publish("t", 1)
        sub = Sub(handler(function=function))
        sub.settle()
        sub.leave()
    sequence()
    assert told(client) == [("g", "<no text>", "1", "1", "2"), ("g", "ValueError: no <number>", "0", "1", "1")]
    (letter,) = set(offsets_of("t_dlq")) - {other}
    text = page(client, "deadletters", **{"class": "-"})
    assert 'value="-" selected' in text
    assert "ValueError: no" not in text
    (link,) = re.findall(r'href="([^"]*)" aria-label="List 1 dead letters', text)
    assert offsets(client.get(unescape(link)).context) == [letter]
    links = [unescape(one) for one in re.findall(r'href="([^"]*/do/[^"]*kind=[^"]*)"', text)]
    assert [one.split("/do/")[1].split("/")[0] for one in links] == [
        "retry-error",
        "dead-letter-error",
        "redrive",
        "discard",
    ]
    asked = [unescape(client.get(one).content.decode()) for one in links]
    assert all(re.search(r": 1\.", one) for one in asked)
    assert all("error “<no text>”" in one for one in asked)
    kind = "<no text>"
    confirm(client, "discard", topic="t_dlq", group="g", kind=kind, upto=letter, reason="no use")
    confirm(client, "dead-letter-error", group="g", topic="t", kind=kind, upto=10**9)
    sequence()
    assert told(client) == [("g", kind, "0", "1", "2"), ("g", "ValueError: no <number>", "0", "1", "1")]


def test_no_class_is_offered_if_all_errors_have_one(client):
    fail_with(1, "no 1")
    assert 'value="-"' not in page(client, "deadletters")
    assert told(client, **{"class": "-"}) == []


def test_a_kind_is_broken_down_by_key_and_a_key_is_redriven_alone(client):
    of_a = [fail_with(number, f"no {number}", key="a") for number in range(3)]
    of_b = fail_with(3, "no 3", key="b")
    kind = "ValueError: no <number>"
    assert not errors(client).rows[0].kind.keys, "it is read only if somebody asks"
    (row,) = errors(client, topic="t", kind=kind).rows
    assert [(one.key, one.retrying, one.dead_letters, one.attempts) for one in row.kind.keys] == [
        ("a", 0, 3, 3),
        ("b", 0, 1, 1),
    ]
    text = page(client, "deadletters", topic="t", kind=kind)
    assert "By key, of 0 retrying messages, 4 dead letters and 4 failed attempts" in text
    (link,) = {unescape(one) for one in re.findall(r'href="([^"]*deadletters/[^"]*key=a[^"]*)"', text)}
    found = client.get(link).context
    assert offsets(found) == of_a[::-1]
    assert str(found["kinds"].rows[0].kind.dead_letters) == "3"
    links = re.findall(r'href="([^"]*do/redrive/[^"]*key=a[^"]*)"', client.get(link).content.decode())
    (redrive,) = {unescape(one) for one in links}
    asked = unescape(client.get(redrive).content.decode())
    assert "key a" in asked
    (said,) = confirm(client, "redrive", topic="t_dlq", key="a", kind=kind, upto=10**9)
    assert said == "Dead letters redriven: 3."
    assert Operation.objects.get().detail.startswith("key 'a'"), Operation.objects.get().detail
    assert offsets(listed(client)) == [of_b]


def test_errors_and_dead_letters_are_filtered_by_key(client):
    one, other = fail_with(1, "no 1", key="a"), fail_with(2, "gone", key="b")
    assert told(client, key="a") == [("g", "ValueError: no <number>", "0", "1", "1")]
    assert offsets(listed(client, key="a")) == [one]
    assert offsets(listed(client, key="b")) == [other]
    assert told(client, key="c") == []


def test_an_empty_key_is_not_no_key(client):
    fail_with(1, "no 1", key="")
    fail_with(2, "no 2")
    (row,) = errors(client, topic="t", kind="ValueError: no <number>").rows
    assert {one.key for one in row.kind.keys} == {"", None}
    keys = page(client, "deadletters", topic="t", kind="ValueError: no <number>").partition("By key, of ")[2]
    assert re.findall(r'<th scope="row">(.*?)</th>', keys)[:2] == ["<code>''</code>", "no key"]
