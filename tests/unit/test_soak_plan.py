"""The soak's plan, its records and its report."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from soak import checker, logs, plan, records
from soak.records import Transaction

from tests.support import soak_jobs
from tests.support.paths import ROOT
from tests.support.soak_runs import GROUPS, TOTAL

pytestmark = pytest.mark.any_engine


# -- the plan and the records -------------------------------------------------


def test_a_seed_gives_the_same_plan_and_a_short_run_has_everything():
    first, again, other = plan.actions(5, 180), plan.actions(5, 180), plan.actions(6, 180)
    assert first == again != other
    assert {action.kind for action in first} == set(plan.ACTIONS)
    assert all(0 < later.at - action.at <= plan.LONGEST + 0.02 for action, later in pairwise(first))


def test_steps_of_many_processes_stand_whole_in_one_file(tmp_path):
    path = records.group_file(tmp_path, "skip")
    code = (
        "import sys; from pathlib import Path; from soak import records\n"
        "for n in range(300): records.write(Path(sys.argv[1]), "
        "[records.Step('S', f'{sys.argv[2]}:{n}', 'a key/with#signs', n, 1, records.now(), records.me())] * 3)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    before = records.now() - 0.001
    processes = [subprocess.Popen([sys.executable, "-c", code, str(path), str(n)], env=env) for n in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    steps = records.steps(path)
    assert Counter(step.message_id for step in steps) == {f"{p}:{n}": 3 for p in range(4) for n in range(300)}
    assert {step.key for step in steps} == {"a key/with#signs"}
    assert {step.pid for step in steps} == {process.pid for process in processes}
    assert len({step.process for step in steps}) == 4
    assert before <= min(step.at for step in steps) <= max(step.at for step in steps) <= records.now()


def test_transactions_with_a_note_of_several_lines(tmp_path):
    one = Transaction(records.UNKNOWN, "p", 3, 4, "an error\nof | two lines", 5.5)
    records.write(records.publishers_file(tmp_path), [one])
    (read,) = records.transactions(records.publishers_file(tmp_path))
    assert read == dataclasses.replace(one, note="an error of | two lines")


# -- the report ---------------------------------------------------------------


def test_the_report_names_what_was_broken(evidence, tmp_path):
    from soak import report
    from soak.monitor import Sample

    broken = checker.verdict("skip: first attempts in order", "10 first starts", ["p:7 started too early"])
    lags = {"outbox": 1, "relay": 0, "jobs": 2, **dict.fromkeys(GROUPS, 5)}
    waits = [
        f"RECORD LOCKS space id 1 index PRIMARY of table `mysqlqueue`.`{table}` trx id 2 lock_mode X waiting"
        for table in ("queue_offsets", "queue_partition_leases")
    ]
    sound = report.Report(
        command="make soak",
        engine="mariadb",
        version="10.11",
        machine="2 cores",
        seed=1,
        seconds=60.0,
        drained_after=3.0,
        done_to_it=dict.fromkeys(plan.ACTIONS, 1),
        downtimes=[(1.0, 3.0)],
        restarts={"steady": 0},
        traffic=report.traffic(evidence),
        groups=report.groups(evidence),
        jobs=report.jobs(soak_jobs.sound()),
        move=report.moved(evidence),
        samples=[Sample(5.0, 10, lags, held_back=True)],
        memory={"steady": [40.0, 50.0], "none": []},
        log_events={"poller.failed": 2},
        database_errors={2006: 2},
        server_deadlocks=logs.server_deadlocks([logs.DETECTED, *waits] * 2),
        verdicts=[checker.verdict("one", "two", [])],
    )
    assert sound.ok
    failed = dataclasses.replace(sound, verdicts=[*sound.verdicts, broken])
    text, data = (path.read_text() for path in reversed(failed.write(tmp_path)))
    assert text.startswith("# Soak: mariadb 10.11, 1.0 minutes: FAILED\n")
    assert "- p:7 started too early\n" in text
    assert "\nDeadlocks in the server's log: 2 (queue_offsets.PRIMARY, queue_partition_leases.PRIMARY).\n" in text
    assert "| SUCCESSFUL " in text
    assert json.loads(data)["ok"] is False
    assert json.loads(data)["traffic"]["messages committed"] == TOTAL
