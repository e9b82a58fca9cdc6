"""A Hypothesis state machine drives jobs against the model in ``job_machine``.

Transactions that enqueue jobs and chains commit or roll back, subscribers leave, vanish and are overtaken, tasks return
and raise, jobs are cancelled, dead letters redriven, and the queue rewound or moved to its end, in any order. After
every step each result must agree with its message, with what its task has written, and with the results of its chain.
In the end all jobs end.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.job_machine import MAX_ATTEMPTS, JobMachine
from tests.support import job_worlds
from tests.support.still_time import Time

PROFILES = {
    "default": hypothesis_settings(max_examples=120, stateful_step_count=50, derandomize=True, database=None),
    "long": hypothesis_settings(
        max_examples=int(os.environ.get("MODEL_EXAMPLES", "300")), stateful_step_count=80, print_blob=True
    ),
}


@pytest.fixture
def machine(db: Any, no_handlers: Any, monkeypatch: pytest.MonkeyPatch, settings: Any, caplog: Any) -> type[JobMachine]:
    """The machine's class, with what its examples share."""
    options = {"MAX_ATTEMPTS": MAX_ATTEMPTS, "BACKOFF": {"initial": 0, "jitter": 0}}
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "OPTIONS": options}}
    caplog.set_level("CRITICAL", logger="django_mysqlqueue")
    caplog.set_level("CRITICAL", logger="django_tasks")
    caplog.set_level("CRITICAL", logger="django.tasks")
    return type("TheMachine", (JobMachine,), {"clock": Time(monkeypatch), "seen": Counter()})


@pytest.mark.promise("Jobs")
@pytest.mark.timeout(0 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 900)
def test_jobs_agree_with_their_model(machine):
    run_state_machine_as_test(
        machine,
        settings=hypothesis_settings(
            PROFILES[os.environ.get("HYPOTHESIS_PROFILE", "default")],
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    asks = {"ask later", "ask much later", "ask without counting", "continue", "continue late"}
    ends = {*asks, "SUCCESSFUL", "Told", "Refused", "JobCancelled", "JobSkipped", "EarlierJobFailed"}
    found = {"found READY", "found RUNNING"}
    assert ends | found | {"RUNNING", "READY", "redriven"} <= machine.seen.keys(), machine.seen


@pytest.mark.promise("Jobs")
def test_a_unique_job_stays_a_dead_letter_while_another_one_holds_its_key(machine):
    """The random runs hardly ever come there."""
    one = machine()
    one.start()
    one.enqueue_single("bad", True)
    for _ in range(MAX_ATTEMPTS):
        one.work(0, 6, [], True)
        one.agrees_with_the_model()
    one.enqueue_single("fine", True)
    one.operate("redrive")
    one.agrees_with_the_model()
    assert one.seen["left"] == 1
    one.teardown()
