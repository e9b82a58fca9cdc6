"""``queuepause --task``: a task of a queue of jobs whose jobs are not claimed, while those of other tasks are."""

from __future__ import annotations

import time

import pytest
from django.core.management import CommandError, call_command

from django_mysqlqueue import operations
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import get_overview, summarize_tasks
from django_mysqlqueue.models import ConsumerGroup, DeliveryState, JobResult, Operation, Slots
from django_mysqlqueue.tasks import call, enqueue_many, job
from tests.support import job_worlds
from tests.support.commands import run
from tests.support.harness import USING, Sub, handler, problems_found, sequence
from tests.support.internals import registry
from tests.support.job_worlds import JOBS
from tests.support.processes import wait_for

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

pytestmark = pytest.mark.promise("Jobs")
ran: list[tuple[str, object]] = []


@task
def geocode(number):
    ran.append(("geocode", number))


@task
def mail(number):
    ran.append(("mail", number))


@task
@job(max_attempts=5, backoff={"initial": 30, "maximum": 30})
def flaky(number):
    ran.append(("flaky", number))
    if len(ran) == 1:
        raise ValueError


@task
@job(rate="1000/s")
def limited(number):
    ran.append(("limited", number))


@task
@job(rate="1/s")
def slow(number):
    ran.append(("slow", number))


GEOCODE = f"{__name__}.geocode"
MAIL = f"{__name__}.mail"


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    ran.clear()


def sub(**options):
    return Sub(registry.handlers()[JOBS], **options)


def pause(path=GEOCODE, **how):
    return operations.pause(*JOBS, task=path, **{"actor": "ada", **how})


def resume(path=GEOCODE, **how):
    return operations.resume(*JOBS, task=path, **{"actor": "ada", **how})


def paused():
    overrides = ConsumerGroup.objects.get(consumer_group="jobs").overrides
    return overrides.get("paused_tasks", {}).get("value", [])


def settle(worker):
    sequence()
    worker.step()
    worker.settle()
    return [name for name, _ in ran]


def comes_to(worker, names):
    """Whether these have run after some polls: a subscriber looks again for what was paused."""
    wait_for(lambda: settle(worker) == names)
    return True


# -- what is claimed ----------------------------------------------------------------


def test_only_the_paused_task_waits():
    worker = sub()
    pause()
    enqueue_many([call(geocode, n) for n in range(3)] + [call(mail, n) for n in range(3)])
    assert settle(worker) == ["mail"] * 3
    assert settle(sub(name="later")) == ["mail"] * 3
    resume()
    assert comes_to(worker, ["mail"] * 3 + ["geocode"] * 3)
    assert ran[3:] == [("geocode", 0), ("geocode", 1), ("geocode", 2)]
    assert not JobResult.objects.exclude(status="SUCCESSFUL").exists()


def test_a_subscriber_that_does_not_know_of_the_pause_claims_nothing():
    worker = sub()
    settle(worker)
    enqueue_many([call(geocode, 1), call(mail, 1)])
    sequence()
    worker.poller._poll()  # It knows of the messages, and has the old options.
    pause()
    for _ in range(3):
        worker.step(tick=False)
        worker.work()
    assert ran == [("mail", 1)]
    assert not DeliveryState.objects.filter(partition_key=GEOCODE).exists()


def test_what_was_claimed_before_runs():
    worker = sub()
    geocode.enqueue(1)
    sequence()
    worker.step()
    pause()
    worker.settle()
    assert ran == [("geocode", 1)]


@pytest.mark.parametrize("priority", [-3, 7])
def test_a_task_is_paused_in_all_priorities(priority):
    worker = sub()
    pause()
    geocode.using(priority=priority).enqueue(1)
    mail.using(priority=priority).enqueue(1)
    assert settle(worker) == ["mail"]
    resume()
    assert comes_to(worker, ["mail", "geocode"])


def test_later_attempts_wait_as_well():
    worker, path = sub(), f"{__name__}.flaky"
    flaky.enqueue(1)
    assert settle(worker) == ["flaky"]
    pause(path)
    DeliveryState.objects.update(invisible_until=1)
    mail.enqueue(1)
    assert settle(worker) == ["flaky", "mail"]
    assert settle(sub(name="other")) == ["flaky", "mail"]
    worker.poller._poll()
    assert worker.poller.shared[0].mode.next_at() is None, "it would poll without a pause"
    resume(path)
    assert comes_to(worker, ["flaky", "mail", "flaky"])


def test_a_task_with_a_rate():
    worker = sub()
    pause(f"{__name__}.limited")
    enqueue_many([call(limited, n) for n in range(3)] + [call(mail, 1)])
    assert settle(worker) == ["mail"]
    assert settle(worker) == ["mail"]
    assert not Slots.objects.filter(limit_key=f"{__name__}.limited").exists()
    resume(f"{__name__}.limited")
    assert comes_to(worker, ["mail"] + ["limited"] * 3)


def test_a_task_that_rests_because_of_its_rate():
    """It is not claimed when its time has come."""
    worker, path = sub(), f"{__name__}.slow"
    enqueue_many([call(slow, n) for n in range(2)])
    assert comes_to(worker, ["slow"])
    pause(path)
    mail.enqueue(1)
    sequence()
    for _ in range(4):
        worker.step(tick=False)
        worker.work()
        time.sleep(0.4)
    assert [name for name, _ in ran] == ["slow", "mail"]
    resume(path)
    assert comes_to(worker, ["slow", "mail", "slow"])


def test_a_subscriber_is_idle_beside_it():
    worker = sub()
    pause()
    geocode.enqueue(1)
    settle(worker)
    assert worker.poller.is_idle()


# -- the operations -------------------------------------------------------------------


def test_several_tasks():
    sub()
    assert pause().changed == 1
    assert pause(MAIL).changed == 1
    assert paused() == [GEOCODE, MAIL]
    assert pause(MAIL).summary == (f"The task {MAIL} is already paused in {JOBS.topic}.",)
    assert resume().changed == 1
    assert paused() == [MAIL]
    assert resume(MAIL).changed == 1
    assert ConsumerGroup.objects.get(consumer_group="jobs").overrides == {}
    assert resume(MAIL).summary == (f"The task {MAIL} is not paused in {JOBS.topic}.",)
    log = Operation.objects.order_by("id").values_list("action", "detail", "actor")
    assert list(log) == [
        ("pause task", GEOCODE, "ada"),
        ("pause task", MAIL, "ada"),
        ("resume task", GEOCODE, "ada"),
        ("resume task", MAIL, "ada"),
    ]


def test_a_preview_changes_nothing():
    sub()
    found = pause(dry_run=True)
    assert (found.planned, found.changed, paused()) == (1, 0, [])
    assert found.summary[0].startswith(f"The task {GEOCODE} will be paused in {JOBS.topic}: ")
    pause()
    assert pause(dry_run=True).planned == 0
    assert resume(dry_run=True).planned == 1
    assert paused() == [GEOCODE]


def test_commands():
    sub()
    call_command("queuepause", *JOBS, task=GEOCODE, interactive=False)
    assert paused() == [GEOCODE]
    call_command("queueresume", *JOBS, task=GEOCODE, interactive=False)
    assert paused() == []


@pytest.mark.parametrize("path", ["", "x" * 182, 5])
def test_a_path_that_cannot_be_one(path):
    sub()
    with pytest.raises(OperationRefused, match="task"):
        pause(path)


def test_other_groups_have_no_tasks():
    Sub(handler())
    with pytest.raises(OperationRefused, match="g/t is not the group of a queue of jobs"):
        operations.pause("g", "t", task=GEOCODE, actor="ada")


def test_the_option_can_be_set_and_read(settings):
    sub()
    operations.settings(*JOBS, {"paused_tasks": [MAIL, GEOCODE]}, actor="ada")
    assert paused() == [GEOCODE, MAIL]
    with pytest.raises(OperationRefused, match="paused_tasks=5: must be a list of dotted paths"):
        operations.settings(*JOBS, {"paused_tasks": 5}, actor="ada")
    with pytest.raises(CommandError, match="must be the dotted path of a task"):
        call_command("queueset", *JOBS, "paused_tasks=", interactive=False)


# -- what is shown --------------------------------------------------------------------


def test_it_is_shown_and_nothing_is_stuck():
    worker = sub()
    pause()
    geocode.enqueue(1)
    geocode.using(priority=4).enqueue(2)
    settle(worker)
    (group,) = get_overview(using=USING).groups
    assert list(group.paused_tasks) == [GEOCODE]
    assert (group.oldest_at, len(group.heads), group.moving_heads) == (None, 2, ())
    (found,) = problems_found()
    assert (found.kind, found.task, found.messages.value, found.severity) == ("paused_task", GEOCODE, 2, 1)
    assert found.text == f"geocode is paused in {JOBS.topic}; 2 messages are waiting."
    (listed,) = [one for one in summarize_tasks(using=USING).tasks if one.task == GEOCODE]
    assert (listed.paused, listed.topic) == ((JOBS.topic,), JOBS.topic)
    assert "geocode is paused" in run("queuestatus")
    resume()
    assert comes_to(worker, ["geocode"] * 2)
    assert problems_found() == []


# -- tasks beside each other ------------------------------------------------------------


def test_a_backlog_of_one_task_does_not_hold_up_another():
    worker = sub(claim_size=10, prefetch=20)
    enqueue_many(call(geocode, n) for n in range(300))
    mail.enqueue(1)
    names = settle(worker)
    assert names.index("mail") < 40
    assert [value for name, value in ran if name == "geocode"] == [*range(names.count("geocode"))]


def test_each_priority_of_a_task_has_its_order():
    enqueue_many(call(geocode.using(priority=n % 2), n) for n in range(20))
    settle(sub())
    assert [value for _, value in ran] == [*range(1, 20, 2), *range(0, 20, 2)]
