"""A process with producers of jobs, one per thread, that enqueue until they are stopped.

    python -m soak.job_producer NAME SEED --threads 2 --rate 5

A transaction enqueues some jobs and inserts a row for each into a ledger. So the ledger has exactly the committed jobs.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import random
import secrets
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import django

from soak import job_plan, records
from soak.publisher import HELD_BACK, HOLD, ROLLBACKS, RollBack, run_all

LATER = 0.05
"""Share of the jobs that are scheduled."""
PRIORITIES = [0] * 8 + [20, -20]
CANCELS = 0.15
"""Share of the transactions after which a recent job is cancelled."""
CANCELS_INSIDE = 0.03
"""Share of the transactions that cancel one of their own jobs."""
RECENT = 30
CANCELS_PATIENT = 0.5
"""Share of the patient jobs that are cancelled, so that many of them are asked to stop while they run."""
INSERT_JOBS = "INSERT INTO soak_jobs (token, job, kind, belongs_to, stage) VALUES "
INSERT_CANCEL = "INSERT INTO soak_job_cancels (job, found) VALUES (%s, %s)"
Row = tuple[str, str, str, str, int]


class Producer:
    """A producer. It runs one transaction at a time."""

    def __init__(self, name: str, seed: int, stop: threading.Event) -> None:
        self.name = f"{name}-{secrets.token_hex(3)}"
        self._rng = random.Random(f"{seed} {name}")
        self._stop = stop
        self._number = 0
        self._latest: list[Any] = []
        """The results of the last transaction."""
        self._recent: deque[Any] = deque(maxlen=RECENT)
        folder = Path(os.environ["SOAK_FOLDER"])
        self._hold = folder / HOLD
        self._path = records.producers_file(folder)
        self._cancels_path = records.cancels_file(folder)

    def run(self, rate: float) -> None:
        """Run ``rate`` transactions per second, of 0 to 200 ms."""
        due = time.monotonic() + self._rng.random()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            if self._hold.exists():
                due = time.monotonic() + HELD_BACK
                continue
            self._latest = []
            self._safely(self._transaction)
            if self._recent and self._rng.random() < CANCELS:
                self._safely(functools.partial(self._cancel_later, self._rng.choice(self._recent)))
            patient = [one for one in self._latest if one.task.name == job_plan.PATIENT]
            if patient and self._rng.random() < CANCELS_PATIENT:
                self._stop.wait(self._rng.uniform(0, job_plan.PATIENCE))
                self._safely(functools.partial(self._cancel_later, patient[0]))
            due = max(due, time.monotonic() - 1) + self._rng.expovariate(rate)

    def _safely(self, function: Any) -> None:
        from django.db import DatabaseError, Error, connection

        first = self._number
        try:
            function()
        except RollBack:
            self._note(records.ROLLED_BACK, first)
        except (Error, DatabaseError) as error:
            self._note(records.UNKNOWN, first, f"{type(error).__name__}: {error}")
            # The log tells the checks of errors that no disturbance explains.
            print(f"{datetime.datetime.now(datetime.UTC):%F %T} WARNING producer.failed error={error}", flush=True)
            connection.close()
            time.sleep(0.2)

    def _transaction(self) -> None:
        from django.db import transaction

        first, rolls_back = self._number, self._rng.random() < ROLLBACKS
        self._number += 1  # A number is never used again: the answer to the COMMIT may be lost.
        with transaction.atomic():
            results = self._enqueue(f"{self.name}:{first}")
            if self._rng.random() < CANCELS_INSIDE:
                self._cancel(self._rng.choice(results))
            time.sleep(self._rng.uniform(0, 0.2))
            if rolls_back:
                raise RollBack
        self._note(records.COMMITTED, first)
        self._recent += results
        self._latest = results

    def _enqueue(self, name: str) -> list[Any]:
        """Enqueue single jobs, several at once, or a chain, and perhaps a unique job; return those to cancel."""
        from django.db import connection

        from django_mysqlqueue.tasks import enqueue_chain, enqueue_many

        rows: list[Row] = []
        if self._rng.random() < 0.25:
            sizes = [self._rng.choice([1, 1, 2, 3]) for _ in range(self._rng.choice([2, 2, 3, 4]))]
            planned = [
                [(self._rng.choice(job_plan.IN_CHAINS), f"{name}/{stage}.{number}") for number in range(size)]
                for stage, size in enumerate(sizes)
            ]
            stages = enqueue_chain(*([self._call(*one) for one in stage] for stage in planned))
        else:
            count = self._rng.choice([1, 1, 2, 4])
            planned = [[(self._rng.choice(job_plan.KINDS), f"{name}.{number}") for number in range(count)]]
            calls = [self._call(*one) for one in planned[0]]
            at_once = self._rng.random() < 0.5
            stages = [enqueue_many(calls) if at_once else [one.task.enqueue(*one.args) for one in calls]]
        chain = name if "/" in planned[0][0][1] else ""
        for stage, (of_stage, found) in enumerate(zip(planned, stages, strict=True)):
            rows += [
                (token, result.id, kind, chain, stage) for (kind, token), result in zip(of_stage, found, strict=True)
            ]
        if self._rng.random() < 0.4:
            rows.append(self._enqueue_unique(f"{name}.unique"))
        with connection.cursor() as cursor:
            marks = ", ".join(["(%s, %s, %s, %s, %s)"] * len(rows))
            cursor.execute(INSERT_JOBS + marks, [value for row in rows for value in row])
        return [result for stage in stages for result in stage]

    def _call(self, kind: str, token: str) -> Any:
        from django_mysqlqueue.tasks import call
        from soak.app import tasks

        options: dict[str, Any] = {"priority": self._rng.choice(PRIORITIES)}
        if self._rng.random() < LATER:
            after = datetime.timedelta(seconds=self._rng.uniform(0, 4))
            options["run_after"] = datetime.datetime.now(datetime.UTC) + after
        return call(getattr(tasks, kind).using(**options), token)

    def _enqueue_unique(self, token: str) -> Row:
        """Enqueue a job that the others enqueue, too. It must see the row of this call, which is inserted later."""
        from soak.app import tasks

        of = f"u{self._rng.randrange(2)}.{int(records.now() / job_plan.WINDOW)}"
        return token, tasks.unique.enqueue(of).id, job_plan.UNIQUE, of, 0

    def _cancel_later(self, result: Any) -> None:
        from django.db import transaction

        with transaction.atomic():
            found = self._cancel(result)
        if found == records.CANCELLED:
            step = records.Step(found, result.id, "", 0, 0, records.now(), records.me())
            records.write(self._cancels_path, [step])

    def _cancel(self, result: Any) -> str:
        from django.db import connection

        from django_mysqlqueue.tasks import cancel_job
        from soak.job_facts import CANCELLED

        cancel_job(result)
        is_cancelled = bool(result.errors) and result.errors[-1].exception_class_path == CANCELLED
        found = records.CANCELLED if result.status == "FAILED" and is_cancelled else str(result.status)
        with connection.cursor() as cursor:
            cursor.execute(INSERT_CANCEL, [result.id, found])
        return found

    def _note(self, verb: str, first: int, note: str = "") -> None:
        one = records.Transaction(verb, self.name, first, self._number, note, records.now())
        records.write(self._path, [one])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("seed", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1.0, help="transactions per second, of all threads together")
    options = parser.parse_args()
    django.setup()
    stop = threading.Event()
    producers = [Producer(f"{options.name}.{n}", options.seed, stop) for n in range(options.threads)]
    run_all([functools.partial(one.run, options.rate / options.threads) for one in producers], stop)


if __name__ == "__main__":
    main()
