"""Transactions"""

from __future__ import annotations

from functools import partial

import pytest
from django.db import transaction

from django_mysqlqueue.tasks.framework import TaskResultStatus
from tests.app.models import Effect
from tests.tasks_conformance import tasks
from tests.tasks_conformance.conftest import now

sentence, needs = pytest.mark.sentence, pytest.mark.needs


@sentence(
    "topics/tasks: Transactions",
    "To prevent the scenario where my_task runs before the Thing is committed to the database, use "
    "transaction.on_commit(), binding all arguments to enqueue() via functools.partial().",
)
def test_enqueueing_after_the_commit(backend):
    results = []
    with transaction.atomic():
        Effect.objects.create(name="thing", value=1)
        transaction.on_commit(lambda: results.append(tasks.count_effects.enqueue(name="thing")))
        assert not results
    backend.run()
    assert now(backend, results[0]).return_value == 1


@sentence(
    "topics/tasks: Transactions",
    "To prevent the scenario where my_task runs before the Thing is committed to the database, use "
    "transaction.on_commit(), binding all arguments to enqueue() via functools.partial().",
)
def test_after_a_rollback_nothing_is_enqueued(backend):
    with transaction.atomic():
        transaction.on_commit(partial(tasks.note.enqueue, thing=1))
        transaction.set_rollback(True)
    backend.run()
    assert not tasks.calls


@sentence("ref/tasks: Task.enqueue", "Enqueues the Task to the Task backend for later execution.")
@needs("background")
def test_enqueueing_in_a_transaction(backend):
    with transaction.atomic():
        Effect.objects.create(name="thing", value=1)
        result = tasks.count_effects.enqueue("thing")
        assert result.status == TaskResultStatus.READY
    backend.run()
    assert now(backend, result).return_value == 1
