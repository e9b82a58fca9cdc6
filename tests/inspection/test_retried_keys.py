"""Messages of few keys that fail again and again, while those of other keys succeed."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.conf import Backoff
from django_mysqlqueue.inspection import find_causes, find_problems, get_overview, retried_keys, status_of
from django_mysqlqueue.models import DeliveryEvent
from tests.support.harness import USING, Sub, handler

pytestmark = pytest.mark.usefixtures("db")

AGAIN = Backoff(initial=10, factor=1, jitter=0)
TENANTS = ("acme", "globex", "initech", "umbrella", "hooli")


@pytest.fixture
def fails(clock):
    """Runs a group of which the attempts for some tenants fail."""

    def run(*tenants, number=100, rounds=2):
        def handle(delivery):
            if delivery.payload in tenants:
                raise PermissionError(delivery.payload)

        sub = Sub(handler("t", "g", handle, mode="shared", backoff=AGAIN, max_attempts=None))
        publish_many("t", [Message(TENANTS[n % 5], key=TENANTS[n % 5]) for n in range(number)])
        for _ in range(rounds):
            sub.settle()
            sub.poller.write_rollups()
            clock.advance(65)
            sub.heart.beat()
        return sub

    return run


def found():
    return [one for one in find_problems(using=USING) if one.kind == "retrying"]


@pytest.mark.parametrize("partitions", [None, 8])
def test_a_key_of_which_every_message_fails(fails, settings, partitions):
    if partitions:
        settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "TOPICS": {"t": {"PARTITIONS": partitions}}}
    fails("globex")
    (problem,) = found()
    assert problem.text == (
        "20 messages of g/t have failed 40 times and wait for another attempt. All of them have the key 'globex'."
    )
    assert (problem.severity, problem.messages.value, problem.error) == (1, 20, "PermissionError: globex")
    assert problem.since == min(DeliveryEvent.objects.filter(outcome="failed").values_list("settled_at", flat=True))
    overview = get_overview(using=USING)
    causes = find_causes(overview)
    assert [cause.kind for cause in causes if any(one.kind == "retrying" for one in cause.problems)] == ["retrying"]
    status = status_of(overview, causes)
    assert (status.state, status.text.startswith(problem.text)) == ("degraded", True)


def test_a_few_keys_are_named_but_not_many(fails):
    fails("globex", "acme")
    (problem,) = found()
    assert problem.text.endswith("All of them have one of the keys 'acme', 'globex'.")


def test_failures_of_most_keys_have_no_key_in_common(fails):
    fails(*TENANTS[1:])
    assert not found()


@pytest.mark.parametrize(("number", "rounds"), [(100, 1), (45, 2)])
def test_a_passing_fault_or_a_few_messages_are_no_such_problem(fails, number, rounds):
    fails("globex", number=number, rounds=rounds)
    assert get_overview(using=USING).retrying.value == number // 5
    assert not found()


def test_if_every_attempt_fails_that_is_the_problem(fails, clock):
    fails("globex", "acme")
    clock.advance(700)
    sub = Sub(handler("t", "g", lambda delivery: 1 / 0, mode="shared", backoff=AGAIN, max_attempts=None))
    clock.advance(65)
    sub.settle()
    sub.poller.write_rollups()
    clock.advance(65)
    sub.heart.beat()
    assert "failing" in {one.kind for one in find_problems(using=USING)}
    assert not found()


def test_of_many_messages_the_latest_due_ones_are_read(fails, monkeypatch):
    monkeypatch.setattr(retried_keys, "MESSAGES", 12)
    fails("globex")
    (problem,) = found()
    assert problem.text.startswith("12+ messages of g/t have failed 24+ times and wait for another attempt. Those ")
    assert problem.text.endswith("due last have the key 'globex'.")
