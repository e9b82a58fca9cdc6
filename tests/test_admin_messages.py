"""Messages of the log and a message's life: what is found, what is told, and what is not guessed."""

from __future__ import annotations

import datetime
import re
from html import unescape
from urllib.parse import parse_qs

import pytest
from django.utils import timezone

from django_mysqlqueue import Message, naming, publish, publish_many
from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.inspection import log_entries as logbook
from django_mysqlqueue.inspection import message_history
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.models import ConsumerOffset, DeliveryEvent, DeliveryState, QueueMessage, SubscriberHeartbeat
from django_mysqlqueue.operations import dropping, pausing, redriving, seeking
from django_mysqlqueue.operations.seeking import Position
from django_mysqlqueue.service import groups
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.dead_letters import DeadLetterFilter
from django_mysqlqueue.service.deliveries import Action, Settlement
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from tests import test_admin
from tests.support.harness import USING, Sub, handler, sequence
from tests.test_admin import HOSTILE, ROOT, WAITS, confirm, page  # fixtures
from tests.test_conformance import both_modes, fail
from tests.test_operations import G, dead_letters, log, offsets_of

pytestmark = pytest.mark.any_engine

client, make_client = test_admin.client, test_admin.make_client  # fixtures
ALL = {"RECORD_DELIVERIES": "all"}


def listed(client, **query):
    """The offsets on a page of the list, and the answer."""
    answer = client.get(f"{ROOT}messages/", query)
    assert answer.status_code == 200, answer.content.decode()
    return [row.entry.offset for row in answer.context["rows"]], answer


def link(answer, text):
    """The query of a link on a page; None: there is no such link."""
    found = re.search(rf'href="[^"?]*\??([^"]*)">{text}</a>', answer.content.decode())
    return None if found is None else {name: one for name, (one,) in parse_qs(unescape(found[1])).items()}


def life(client, offset, group="g"):
    """What a message's page tells of one group: its tag, what happened, what is not known."""
    answer = client.get(f"{ROOT}message/", {"offset": offset})
    assert answer.status_code == 200, answer.content.decode()
    (one,) = [one for one in answer.context["lives"] if one.ref.group == group]
    return one.tag, [step.text for step in one.steps], one.note


# -- the list -----------------------------------------------------------------


@pytest.fixture
def small_pages(monkeypatch):
    monkeypatch.setattr("django_mysqlqueue.admin.pages.messages.PAGE_ROWS", 3)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(
    ("query", "merged"),
    [({}, 50), ({"topic": "t"}, 50), ({"topic": "t"}, 2), ({"topic": "t", "key": "b"}, 50), ({"topic": "u"}, 2)],
)
def test_all_that_is_asked_for_newest_first_in_pages_there_and_back(client, monkeypatch, query, merged):
    monkeypatch.setattr(Page, "bounds", Bounds(merged_partitions=merged, walked=4))
    for number in range(36):
        publish("tu"[number % 2], number, key="abc"[number % 3])
        sequence()
    wanted = QueueMessage.objects.filter(topic__in=query.get("topic", "tu"), partition_key__in=query.get("key", "abc"))
    wanted = sorted(wanted.values_list("offset", flat=True), reverse=True)
    down, pages = [], []
    given = dict(query)
    while given is not None:
        found, answer = listed(client, **given)
        down += found
        pages.append(given)
        given = link(answer, "Older") or link(answer, "Go on looking: older")
    assert down == wanted
    assert len(pages) > 1
    up, last = [], found
    while (given := link(answer, "Newer") or link(answer, "Go on looking: newer")) is not None:
        found, answer = listed(client, **given)
        up = found + up
        assert len(up) <= len(wanted)
    assert up == wanted[: len(wanted) - len(last)]
    assert listed(client, **link(answer, "Newest"))[0] == listed(client, **query)[0]


def test_a_walk_says_what_it_has_looked_at(client, monkeypatch):
    monkeypatch.setattr(Page, "bounds", Bounds(merged_partitions=1, walked=5))
    rare = log(2, topic="rare")
    offsets = log(12)
    found, answer = listed(client, topic="rare")
    assert found == []
    assert f"only offsets {offsets[-5]} to {offsets[-1]} were looked at" in answer.content.decode()
    while not found:
        found, answer = listed(client, **link(answer, "Go on looking: older"))
    assert found == rare[::-1]
    assert link(answer, "Go on looking: older") is None


def test_from_an_offset_and_from_a_time_on(client):
    offsets = log(6, "a")
    base = 1_700_000_000_000
    for number, offset in enumerate(offsets):
        QueueMessage.objects.filter(offset=offset).update(published_at=base + number * 1000)
    assert listed(client, offset=offsets[2])[0] == offsets[2::-1]
    assert listed(client, offset=offsets[2], topic="t", key="a")[0] == offsets[2::-1]
    assert listed(client, offset=2**63 - 1)[0] == offsets[::-1]
    at = timezone.make_naive(datetime.datetime.fromtimestamp(base / 1000 + 3, datetime.UTC))
    assert listed(client, time=at.isoformat())[0] == offsets[3::-1]
    assert listed(client, time=at.isoformat(), offset=offsets[1])[0] == offsets[1::-1]
    newer = link(listed(client, offset=offsets[2])[1], "Newer")
    assert listed(client, **newer)[0] == offsets[:2:-1]
    assert listed(client, time="1980-01-01T00:00:00")[0] == []


def test_the_partition_whose_key_is_empty(client):
    publish("t", 1, key="")
    publish("t", 2, key="b")
    sequence()
    first, second = offsets_of()
    assert listed(client, topic="t", key="", keyed=1)[0] == [first]
    assert listed(client, topic="t", key="b")[0] == [second]
    assert listed(client, topic="t", key="")[0] == [second, first]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"key": "a"}, "name the topic, too"),
        ({"offset": "x"}, "offset='x': must be a whole number"),
        ({"before": "-1"}, "before='-1': must be a whole number"),
        ({"time": "yesterday"}, "time='yesterday': must be a date and a time"),
        ({"time": "2026-13-40T00:00:00"}, "must be a date and a time"),
    ],
)
def test_a_query_that_makes_no_sense_is_told_so(client, query, says):
    assert says in page(client, "messages", 400, **query)


def test_by_id(client, settings):
    publish("t", 1, key="a", id="order-7")
    publish("t", 2, key="b", id="order-7")
    publish("u", 3, key="a", id="order-7")
    keyless = publish("t", 4)
    sequence()
    one, two = QueueMessage.objects.filter(topic="t", message_id="order-7").values_list("offset", flat=True)
    three = offsets_of("u")[0]
    assert listed(client, topic="t", key="a", id="order-7")[0] == [one]
    # Also where nobody has ever worked.
    assert listed(client, topic="t", id="order-7")[0] == [two, one]
    found, answer = listed(client, topic="t", id="order-8")
    assert found == []
    assert "looked for in every partition." in answer.content.decode()
    assert "under Scheduled" in answer.content.decode()
    by_place = listed(client, topic="t", id=keyless)
    assert by_place[0] == [QueueMessage.objects.get(message_id=keyless).offset]
    sub = Sub(handler("t", "g"), handler("t", "h"), handler("u", "g"))
    sub.settle()
    assert listed(client, topic="t", id="order-7")[0] == [two, one]
    assert listed(client, id="order-7")[0] == [three, two, one]
    assert listed(client, topic="u", id="nothing")[0] == []


def test_an_id_of_its_own_time_is_found_where_nobody_knows_the_partition(client):
    message_id = naming.new_message_id()
    log(3)
    publish("t", 1, key="somewhere", id=message_id)
    sequence()
    log(3)
    offset = QueueMessage.objects.get(message_id=message_id).offset
    assert listed(client, topic="t", id=message_id)[0] == [offset]
    assert listed(client, id=message_id)[0] == [offset]
    assert listed(client, topic="other", id=message_id)[0] == []
    text = listed(client, id=naming.new_message_id())[1].content.decode()
    assert "of that time were looked at" in text


def test_the_search_for_an_id_says_where_it_stopped(client, monkeypatch):
    monkeypatch.setattr(Page, "bounds", Bounds(searched_partitions=2))
    keys = "abcd"
    publish_many("t", (Message(1, key=key, id="x" + key) for key in keys))
    sequence()
    Sub(handler("t", "g")).settle()
    assert len(listed(client, topic="t", id="xb")[0]) == 1
    found, answer = listed(client, topic="t", id="xd")
    assert found == []
    assert "looked for in 2 partitions" in answer.content.decode()


def test_marks_of_dead_letters_and_redriven_ones(client):
    letters = dead_letters(2, keys="a")
    text = page(client, "messages", topic="t_dlq")
    assert text.count("dead letter of g") == 2
    letter = QueueMessage.objects.get(offset=letters[0])
    assert listed(client, topic="t_dlq", id=letter.message_id)[0] == [letters[0]]
    redriving.redrive(USING, DeadLetterFilter("t_dlq", offsets=(letters[0],)), actor="ada")
    sequence()
    text = page(client, "messages", topic="t")
    assert "redriven" in text
    assert "for g alone" in text


# -- a message ----------------------------------------------------------------


def test_what_a_message_says(client, make_client, settings):
    publish("t", {"order": 7}, key="k", id="order-7", metadata={"from": "shop"})
    sequence()
    (offset,) = offsets_of()
    text = page(client, "message", offset=offset)
    assert '"order": 7' in text
    assert '"from": "shop"' in text
    assert "order-7" in text
    hidden = page(make_client("view_dashboard"), "message", offset=offset)
    assert '"order"' not in hidden
    assert '"shop"' not in hidden
    assert "order-7" in hidden
    settings.MYSQLQUEUE = {"REDACT": "tests.test_admin_messages.redact"}
    redacted = page(client, "message", offset=offset)
    assert "<payload of t>" in redacted
    assert "<metadata of t>" in redacted
    assert '"shop"' not in redacted


def redact(text, *, topic, kind):
    return f"<{kind} of {topic}>"


def test_a_long_payload_is_cut_and_bytes_are_shown_as_text(client):
    publish("t", "x" * 100_000, key="k")
    publish("t", b"\xff\x00<b>", key="k")
    sequence()
    long, raw = offsets_of()
    text = page(client, "message", offset=long)
    assert "(100,002 bytes in all)" in text
    assert len(text) < 60_000
    assert "\\xff" in client.get(f"{ROOT}message/", {"offset": raw}).context["payload"]


def test_hostile_text_stays_text(client):
    sub = Sub(
        handler(function=lambda delivery: (_ for _ in ()).throw(ValueError(HOSTILE)), backoff=WAITS), name=HOSTILE
    )
    publish("t", {"x": HOSTILE}, key=HOSTILE, id=HOSTILE, metadata={"m": HOSTILE})
    sequence()
    sub.settle()
    (offset,) = offsets_of()
    for name, query in (
        ("message", {"offset": offset}),
        ("messages", {}),
        ("messages", {"topic": "t", "key": HOSTILE}),
    ):
        raw = client.get(f"{ROOT}{name}/", query).content.decode()
        assert "<script>alert" not in raw
        assert "&lt;script&gt;" in raw
        own = raw[raw.index('<div class="mq-page') :]
        assert not re.findall(r"<script(?![^>]*\bsrc=)[^>]*>|<style|\sstyle=|\son\w+=|javascript:", own)


@both_modes
@pytest.mark.parametrize("recorded", ["all", "failures", "none"])
def test_its_life_step_by_step(client, settings, mode, recorded):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": recorded}
    sub = Sub(handler(mode=mode, function=fail, max_attempts=2, backoff=WAITS), handler("t", "h"))
    offset, behind = log(2, "a")
    tag, told, note = life(client, offset)
    assert (tag, told) == ("not claimed yet", ["Not claimed yet; unsettled messages before it in its partition: 0."])
    assert "before it in its partition: 1." in life(client, behind)[1][-1]
    sub.step()
    held = next(one for one in iter(sub.take, None) if one.claimed.ref == G)
    tag, told, _ = life(client, offset)
    assert tag == "in flight"
    assert f"Attempt 1: with {sub.name} since" in told[-1]
    assert ("Others may have it in" in told[-1]) == (mode == "shared")
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    assert "gives no sign of life. No subscriber of the group is alive." in life(client, offset)[1][-1]
    sub.heart.beat()
    sub.run(held)
    sub.flush()
    tag, told, _ = life(client, offset)
    assert tag == "waits"
    assert "Attempts that failed: 1." in told[-1]
    if recorded != "none":
        assert told[-3:-1] == [f"Attempt 1: handed to {sub.name}.", told[-2]]
        assert "Attempt 1 failed after" in told[-2]
    told = confirm(client, "retry-selected", group="g", topic="t", row=[offset])
    assert told == ["Messages of the group g/t that are due now: 1."]
    assert life(client, offset)[1][-1].startswith("It is due.")
    sub.step(times=2)
    sub.settle()
    sequence()
    tag, told, note = life(client, offset)
    if recorded == "none":
        assert (tag, told) == ("settled", ["It is settled: acked, or a dead letter was made of it."])
        assert "not recorded" in note
    else:
        assert tag == "dead-lettered"
        assert told[-1] == "Given up after attempt 2: a dead letter was made of it."
        assert told[-2] == f"Attempt 2: handed to {sub.name}."
    tag, told, note = life(client, offset, "h")
    if recorded == "all":
        assert (tag, note) == ("acked", "")
        assert told[0] == f"Attempt 1: handed to {sub.name}."
        assert told[1].startswith("Acked after")
    else:
        assert (tag, len(told)) == ("settled", 1)
        assert "acked is lost" in note if recorded == "failures" else "not recorded" in note


@both_modes
def test_snoozed_and_lost(client, settings, mode):
    settings.MYSQLQUEUE = ALL
    (offset,) = log(1, "a")
    one = Sub(handler(mode=mode, function=lambda delivery: delivery.snooze(0)))
    one.step()
    one.work(1)
    one.flush()
    one.step()
    lost = one.take() or one.step(times=2).take()
    assert lost is not None
    SubscriberHeartbeat.objects.all().delete()
    DeliveryState.objects.update(invisible_until=0)
    other = Sub(handler(mode=mode))
    other.settle()
    tag, told, _ = life(client, offset)
    assert tag == "acked"
    assert told[1].startswith("Put off by its handler")
    assert f"{one.name} vanished with it: it comes again." in told
    assert told[-2] == f"Attempt 1: handed to {other.name}."


def test_retry_now_is_offered_where_it_waits_and_to_who_may(client, make_client):
    sub = Sub(handler(function=fail, backoff=WAITS), handler("t", "h"))
    offset, _ = log(2, "a")
    sub.settle()
    text = client.get(f"{ROOT}message/", {"offset": offset}).content.decode()
    (address,) = re.findall(r'href="([^"]*do/retry-selected/[^"]*)"', text)
    asked = client.get(address.replace("&amp;", "&"))
    assert "Messages of the group g/t that will be retried now: 1." in asked.content.decode()
    assert "do/" not in page(make_client("view_dashboard", "see_payloads"), "message", offset=offset)


def offered(client, offset):
    """The addresses under which the message's page offers to dead-letter it."""
    text = client.get(f"{ROOT}message/", {"offset": offset}).content.decode()
    return [unescape(one) for one in re.findall(r'href="([^"]*do/dead-letter/[^"]*)"', text)]


@both_modes
def test_dead_letter_now_is_offered_where_nobody_alive_holds_it(client, make_client, settings, mode):
    settings.MYSQLQUEUE = ALL
    sub = Sub(handler(function=fail, mode=mode, backoff=WAITS), handler("t", "h"))
    offset, other = log(2, "a")
    assert offered(client, offset) == []  # not claimed
    sub.step()
    assert offered(client, offset) == []  # a live subscriber holds it
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    assert len(offered(client, offset)) == 2  # for both groups: it is lost
    text = unescape(client.get(f"{ROOT}inflight/").content.decode())
    assert len(re.findall(rf"do/dead-letter/\?group=[gh]&topic=t&row=({offset}|{other})&", text)) == 4
    sub.heart.beat()
    assert "do/dead-letter/" not in page(client, "inflight")
    sub.settle()
    (address,) = offered(client, offset)  # it waits for group g; h has acked it
    asked = client.get(address)
    assert f"Message {offset} has failed 1 time." in asked.content.decode()
    assert offered(make_client("view_dashboard", "see_payloads"), offset) == []
    told = confirm(client, "dead-letter", group="g", topic="t", row=offset, reason="a test order")
    assert told == ["Messages dead-lettered to t_dlq: 1."]
    assert offered(client, offset) == []
    sequence()
    tag, told, _ = life(client, offset)
    assert tag == "dead-lettered"
    assert told[-1] == "ada0 dead-lettered it. Attempts that had failed: 1."


def test_in_a_dlq_topic_it_is_not_offered(client):
    sub = Sub(handler(function=fail, max_attempts=1), handler("t_dlq", "alarm", fail, backoff=WAITS))
    log(1, "a")
    sub.settle()
    sub.settle()
    (letter,) = QueueMessage.objects.filter(topic="t_dlq").values_list("offset", flat=True)
    tag, _, _ = life(client, letter, "alarm")
    assert tag == "waits"
    assert offered(client, letter) == []


def test_standings_of_groups_that_have_nothing_to_do_with_it(client):
    letters = dead_letters(1, keys="a")
    groups.register(USING, GroupRef("late", "t"), mode="ordered", start="latest")
    groups.register(USING, GroupRef("new", "t"), mode="ordered", start="earliest")
    redriving.redrive(USING, DeadLetterFilter("t_dlq", offsets=tuple(letters)), actor="ada")
    sequence()
    first, again = offsets_of()
    assert life(client, first, "late")[0] == "before its start"
    assert life(client, first, "new")[0] == "not claimed yet"
    assert life(client, again, "late")[0] == "not for this group"
    pausing.pause(USING, G, actor="ada")
    assert "The group is paused" in life(client, again)[1][-1]
    ConsumerOffset.objects.filter(consumer_group="g").update(offset_claimed=again)
    assert life(client, again)[0] == "passed over"


def test_a_seek_makes_it_skipped_and_its_records_stay(client, settings):
    settings.MYSQLQUEUE = ALL
    first, second = log(2, "a")
    sub = Sub(handler())
    sub.step()
    sub.work(1)
    sub.flush()
    sub.leave()
    seeking.seek(USING, G, seeking.position_of(USING, "latest"), actor="ada")
    assert life(client, first)[0] == "acked"
    tag, told, _ = life(client, second)
    assert tag == "before its start"
    assert told == [f"The group goes on behind offset {second}: it was settled before a seek, or is passed over."]


@pytest.mark.parametrize(("module", "operation"), [(seeking, "seek"), (dropping, "drop")])
def test_an_operation_that_did_not_finish_is_told(client, monkeypatch, module, operation):
    (offset,) = log(1, "a")
    Sub(handler())
    monkeypatch.setattr(module, "_end", None)
    with pytest.raises(TypeError):
        getattr(module, operation)(USING, G, *([Position(0)] if module is seeking else []), actor="ada")
    assert (
        life(client, offset)[1][-1]
        == f"A {operation} of the group has not finished. If it was interrupted, run it again."
    )


def test_what_is_before_it_is_counted_no_further_than_the_cap(db):
    sub = Sub(handler(function=fail, max_attempts=9, backoff=WAITS), batch_size=2, prefetch=2)
    offsets = log(8, "a")
    sub.step()
    sub.work(2)
    sub.flush()
    session = Session(USING)

    def before(offset):
        (state,) = message_history.states(
            session, logbook.entries(session, [offset])[0], bounds=Bounds(partition_count=3)
        )
        return state.before

    found = [before(offset) for offset in offsets]
    assert found[2:] == [Count(2), Count(3), *[Count(3, exact=False)] * 4]
    assert found[:2] == [None, None]


# -- where it went on ---------------------------------------------------------


def test_from_the_original_to_the_dead_letter_to_where_it_went_and_back(client):
    (letter,) = dead_letters(1, keys="a")
    (first,) = offsets_of()
    text = page(client, "message", offset=first)
    assert "Look at the dead letter" in text
    assert f"offset={letter}" in text
    text = page(client, "message", offset=letter)
    assert f"It is a dead letter: g gave up on message {first} of t." in text
    assert f'message/?offset={first}"' in text
    assert "ValueError: no 0" in text
    redriving.redrive(USING, DeadLetterFilter("t_dlq", offsets=(letter,)), actor="ada")
    text = page(client, "message", offset=letter)
    assert "not in the log any more" in text
    assert "ada redrove it to g." in text
    assert "The new message is not in the log" in text
    assert "The dead letter is not in the log" in page(client, "message", offset=first)
    sequence()
    (_, again) = offsets_of()
    assert f'message/?offset={again}"' in page(client, "message", offset=letter)
    text = page(client, "message", offset=first)
    assert f"ada redrove it: it went on as message {again}." in text
    text = page(client, "message", offset=again)
    assert f"It was redriven: the original is message {first} of t." in text
    assert "It is for the group g alone." in text


def test_edited_ones_name_the_original_and_the_other_way_round(client):
    (letter,) = dead_letters(1, keys="a")
    (first,) = offsets_of()
    redriving.replace(USING, "t_dlq", letter, {"mended": True}, actor="ada")
    sequence()
    (_, new) = offsets_of()
    assert f"ada edited and redrove it: it went on as message {new}." in page(client, "message", offset=first)
    assert "ada edited and redrove it to g." in page(client, "message", offset=letter)
    text = page(client, "message", offset=new)
    assert "An operator sent it in the place of the message" in text
    assert f'message/?offset={first}"' in text
    QueueMessage.objects.filter(offset=first).delete()
    assert "That one is not in the log any more." in page(client, "message", offset=new)


def test_a_discarded_dead_letter_says_who_and_why(client):
    (letter,) = dead_letters(1, keys="a")
    redriving.discard(USING, DeadLetterFilter("t_dlq", offsets=(letter,)), actor="ada", reason="a test order")
    assert "ada discarded it: a test order" in page(client, "message", offset=letter)


def test_a_second_failure_does_not_name_the_first_one_as_its_successor(client):
    (letter,) = dead_letters(1, keys="a")
    for number in range(2):
        redriving.redrive(USING, DeadLetterFilter("t_dlq", offsets=(letter,)), actor=f"operator-{number}")
        sequence()
        sub = Sub(handler(function=fail, max_attempts=1))
        sub.settle()
        sub.leave()
        sequence()
        (letter,) = offsets_of("t_dlq")
    first, second, third = offsets_of()
    text = page(client, "message", offset=first)
    assert f"operator-0 redrove it: it went on as message {second}." in text
    assert f"operator-1 redrove it: it went on as message {third}." in text
    text = page(client, "message", offset=second)
    assert "operator-0" not in text
    assert f"operator-1 redrove it: it went on as message {third}." in text
    assert "redrove it" not in page(client, "message", offset=third)


def test_a_message_that_is_gone_is_told_from_its_records(client, settings):
    settings.MYSQLQUEUE = ALL
    sub = Sub(handler())
    (offset,) = log(1, "a")
    sub.settle()
    QueueMessage.objects.all().delete()
    text = page(client, "message", offset=offset)
    assert "not in the log any more" in text
    tag, told, _ = life(client, offset)
    assert tag == "acked"
    assert told[0] == f"Attempt 1: handed to {sub.name}."
    DeliveryEvent.objects.all().delete()
    assert f"There is no message at offset {offset}" in page(client, "message", 400, offset=offset)


def test_a_dropped_groups_records_stay(client, settings):
    settings.MYSQLQUEUE = ALL
    sub = Sub(handler())
    (offset,) = log(1, "a")
    sub.settle()
    sub.leave()
    dropping.drop(USING, G, actor="ada")
    assert life(client, offset)[0] == "acked"


def test_no_more_records_than_a_page_holds(client, settings, monkeypatch):
    settings.MYSQLQUEUE = ALL
    monkeypatch.setattr(Page, "bounds", Bounds(recorded=3))
    sub = Sub(handler(function=fail, max_attempts=9))
    (offset,) = log(1, "a")
    sub.settle()
    text = page(client, "message", offset=offset)
    assert "Only the newest 3 records are shown." in text
    assert "Attempt 9" in text
    assert "Attempt 6 failed" not in text


@pytest.mark.parametrize(
    ("offset", "says"),
    [("0", "must be a whole number from 1"), ("x", "must be a whole number"), ("99999999", "There is no message at")],
)
def test_an_offset_that_is_none(client, offset, says):
    assert says in page(client, "message", 400, offset=offset)


def test_without_an_offset_it_asks_for_one(client):
    assert 'name="offset"' in page(client, "message")


def test_a_message_that_was_deleted_before_it_was_handled(client):
    publish("t", 1, key="k")
    sequence()
    sub = Sub(handler())
    sub.step()
    held = sub.take()
    sub.inbox.settle(Settlement(held.claimed, Action.DELETED), ordered=True)
    sub.flush()
    (offset,) = offsets_of("t")
    QueueMessage.objects.all().delete()
    tag, steps, _ = life(client, offset)
    assert tag == "deleted"
    assert f"Deleted from the log before it was handled; {sub.name} settled it without a call." in steps
    assert f"Handed to {sub.name}." in steps
