"""The dashboard's page of a message."""

from __future__ import annotations

import re
from html import unescape

import pytest

from django_mysqlqueue import publish
from django_mysqlqueue.inspection import message_history
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, QueueMessage, SubscriberHeartbeat
from django_mysqlqueue.operations import dropping, pausing, redriving, seeking
from django_mysqlqueue.operations.seeking import Position
from tests.support.dashboard import HOSTILE, ROOT, WAITS, confirm, life, page
from tests.support.handlers import both_modes, fail
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import Count, DeadLetterFilter, GroupRef, Session, groups
from tests.support.scenarios import G, dead_letters, log, offsets_of

pytestmark = pytest.mark.any_engine

ALL = {"RECORD_DELIVERIES": "all"}
FREE = "Nothing holds it up: a subscriber claims it when it has room."
BUSY = "The subscribers are busy: messages of this group occupy the only handler thread."


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
    settings.MYSQLQUEUE = {"REDACT": "tests.admin.test_message.redact"}
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
    assert "(100,002 bytes in total)" in text
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
    told_first = "Not claimed yet; unsettled messages before it in its partition: 0."
    assert (tag, told) == ("not claimed yet", [told_first, FREE])
    assert "before it in its partition: 1." in life(client, behind)[1][-2]
    sub.step()
    held = next(one for one in iter(sub.take, None) if one.claimed.ref == G)
    tag, told, _ = life(client, offset)
    assert tag == "in flight"
    assert f"Attempt 1: in flight at {sub.name} since" in told[-1]
    assert ("Other subscribers can claim it in" in told[-1]) == (mode == "shared")
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    assert "This subscriber is lost. The group has no live subscribers." in life(client, offset)[1][-1]
    sub.heart.beat()
    sub.run(held)
    sub.flush()
    tag, told, _ = life(client, offset)
    assert tag == "waiting"
    assert "Failed attempts: 1." in told[-1]
    if recorded != "none":
        assert told[-3:-1] == [f"Attempt 1: claimed by {sub.name}.", told[-2]]
        assert "Attempt 1 failed after" in told[-2]
    told = confirm(client, "retry-selected", group="g", topic="t", row=[offset])
    assert told == ["Messages of the group g/t that are due now: 1."]
    # In ordered mode, the subscriber has claimed the message behind it.
    why = f"It waits for message {behind} of its partition, which is in flight at {sub.name}."
    assert life(client, offset)[1][-2:] == [
        "The message is due. Failed attempts: 1.",
        why if mode == "ordered" else BUSY,
    ]
    sub.step(times=2)
    sub.settle()
    sequence()
    tag, told, note = life(client, offset)
    if recorded == "none":
        assert (tag, told) == ("settled", ["The message is settled: acked or dead-lettered."])
        assert "not recorded" in note
    else:
        assert tag == "dead-lettered"
        assert told[-1] == "Dead-lettered after attempt 2."
        assert told[-2] == f"Attempt 2: claimed by {sub.name}."
    tag, told, note = life(client, offset, "h")
    if recorded == "all":
        assert (tag, note) == ("acked", "")
        assert told[0] == f"Attempt 1: claimed by {sub.name}."
        assert told[1].startswith("Acked after")
    else:
        assert (tag, len(told)) == ("settled", 1)
        assert "Acks of this group are not recorded" in note if recorded == "failures" else "not recorded" in note


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
    assert told[1].startswith("Snoozed by its handler")
    assert f"{one.name} was lost while it held the message. The message is redelivered." in told
    assert told[-2] == f"Attempt 1: claimed by {other.name}."


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
    assert told[-1] == "Dead-lettered by ada0. Failed attempts before: 1."


def test_in_a_dlq_topic_it_is_not_offered(client):
    sub = Sub(handler(function=fail, max_attempts=1), handler("t_dlq", "alarm", fail, backoff=WAITS))
    log(1, "a")
    sub.settle()
    sub.settle()
    (letter,) = QueueMessage.objects.filter(topic="t_dlq").values_list("offset", flat=True)
    tag, _, _ = life(client, letter, "alarm")
    assert tag == "waiting"
    assert offered(client, letter) == []


def test_standings_of_groups_that_have_nothing_to_do_with_it(client):
    letters = dead_letters(1, keys="a")
    groups.register(USING, GroupRef("late", "t"), mode="ordered", start="latest")
    groups.register(USING, GroupRef("new", "t"), mode="ordered", start="earliest")
    redriving.redrive_all(USING, DeadLetterFilter("t_dlq", offsets=tuple(letters)), actor="ada")
    sequence()
    first, again = offsets_of()
    assert life(client, first, "late")[0] == "before the start"
    assert life(client, first, "new")[0] == "not claimed yet"
    assert life(client, again, "late")[0] == "not for this group"
    pausing.set_paused(USING, G, actor="ada", paused=True)
    assert "The group is paused" in life(client, again)[1][-1]
    ConsumerOffset.objects.filter(consumer_group="g").update(offset_claimed=again)
    assert life(client, again)[0] == "skipped"


def test_a_seek_makes_it_skipped_and_its_records_stay(client, settings):
    settings.MYSQLQUEUE = ALL
    first, second = log(2, "a")
    sub = Sub(handler())
    sub.step()
    sub.work(1)
    sub.flush()
    sub.leave()
    seeking.move(USING, G, seeking.position_of(USING, "latest"), actor="ada")
    assert life(client, first)[0] == "acked"
    tag, told, _ = life(client, second)
    assert tag == "before the start"
    assert told == [f"The group starts after offset {second}: the message was settled before a seek, or is skipped."]


@pytest.mark.parametrize(
    ("operation", "run", "module"),
    [
        ("seek", lambda: seeking.move(USING, G, Position(0), actor="ada"), seeking),
        ("drop", lambda: dropping.drop(USING, G, actor="ada"), dropping),
    ],
)
def test_an_operation_that_did_not_finish_is_told(client, monkeypatch, operation, run, module):
    (offset,) = log(1, "a")
    Sub(handler())
    monkeypatch.setattr(module, "_end", None)
    with pytest.raises(TypeError):
        run()
    assert (
        life(client, offset)[1][-1]
        == f"A {operation} of this group has not finished. If it was interrupted, run it again."
    )


def test_what_is_before_it_is_counted_no_further_than_the_cap(db):
    sub = Sub(handler(function=fail, max_attempts=9, backoff=WAITS), claim_size=2, prefetch=2)
    offsets = log(8, "a")
    sub.step()
    sub.work(2)
    sub.flush()
    session = Session(USING)

    def before(offset):
        (state,) = message_history.states(
            session, message_history.content(session, offset, most=1), bounds=Bounds(partition_count=3)
        )
        return state.before

    found = [before(offset) for offset in offsets]
    assert found[2:] == [Count(2), Count(3), *[Count(3, exact=False)] * 4]
    assert found[:2] == [None, None]
