"""Runs of the soak's jobs as it would record them, sound and broken."""

from __future__ import annotations

import dataclasses
from itertools import count

from soak import job_checker, job_plan, records
from soak.job_facts import ASKED, CANCELLED, EARLIER, PLANNED, REFUSED, Enqueued, JobEvidence, Result, Stage
from soak.records import Step, Transaction

ME = "1-a"
WORKER = "steady-1"
ERRORS = {
    job_plan.POISON: [PLANNED] * job_plan.MAX_ATTEMPTS,
    job_plan.MENDED: [PLANNED] * job_plan.MAX_ATTEMPTS,
    job_plan.REFUSED: [REFUSED],
    job_plan.FLAKY: [PLANNED],
    job_plan.FINE: [],
    job_plan.ASKING: [ASKED],
    job_plan.WAITING: [],
    job_plan.CONTINUING: [],
}
EARLIER_TEXT = "The job 'x' of an earlier stage of the chain has failed."
CANCELLED_TEXT = "The job was cancelled before it started."


def token_of(kind, fate, pattern="p:{}.0"):
    """A token, and so a number of a transaction, with which a task does what a test needs."""
    return next(token for token in map(pattern.format, count()) if job_plan.fate(kind, token) == fate)


class Run:
    """A run, one job after the other."""

    def __init__(self):
        self.ledger, self.results, self.stages, self.steps = [], {}, {}, []
        self.effects, self.published, self.cancelled, self.cancelled_at = {}, {}, {}, {}
        self.at = 1000

    def job(self, kind, token, of="", stage=0, *, fate=None, is_published=True):
        """Add a job that has ended as planned; return its id."""
        job = f"job-{len(self.results)}"
        argument = of if kind == job_plan.UNIQUE else token
        fate = fate or job_plan.fate(kind, argument)
        errors, is_done = ERRORS[fate], fate not in (job_plan.POISON, job_plan.REFUSED, job_plan.MENDED)
        began = self.at
        attempts = len(errors) + is_done
        for attempt in range(1, attempts + 1):
            verbs = (records.STARTED, records.DONE if is_done and attempt == attempts else records.FAILED)
            self.steps += [
                Step(verb, job, argument, 0, attempt, float(self.at + n), ME) for n, verb in enumerate(verbs)
            ]
            self.at += 10
        self.ledger.append(Enqueued(token, job, kind, of, stage))
        value = {"token": argument} | ({"saw": [token]} if kind == job_plan.UNIQUE else {})
        self.results[job] = Result(
            job,
            kind,
            "SUCCESSFUL" if is_done else "FAILED",
            [(path, "no") for path in errors],
            [WORKER] * attempts,
            began,
            self.at,
            value if is_done else None,
        )
        self.published[job] = 1
        if is_done and kind in job_plan.ATOMIC_KINDS:
            self.effects[job] = 1 + (fate == job_plan.CONTINUING)
        return job

    def not_called(self, token, path, text, of="", stage=0):
        """Add a job that has failed without a start; return its id."""
        job = self.job(job_plan.ATOMIC, token, of, stage, fate=job_plan.POISON)
        self.results[job] = dataclasses.replace(self.results[job], errors=[(path, text)], workers=[], started_at=0)
        self.steps = [step for step in self.steps if step.message_id != job]
        return job

    def chain(self, chain, *stages):
        """Add a chain of jobs of the tasks in each stage; return their ids. Those after a failure fail, too."""
        found, failed = [], False
        for stage, kinds in enumerate(stages):
            jobs = []
            for number, (kind, fate) in enumerate(kinds):
                token = f"{chain}/{stage}.{number}"
                if failed:
                    jobs.append(self.not_called(token, EARLIER, EARLIER_TEXT, chain, stage))
                    self.published[jobs[-1]] = 0
                else:
                    jobs.append(self.job(kind, token, chain, stage, fate=fate))
            remaining = sum(self.results[job].status != "SUCCESSFUL" for job in jobs)
            failed = failed or remaining > 0
            self.stages[f"{chain}:{stage:04}"] = Stage(f"{chain}:{stage:04}", remaining, len(jobs), jobs)
            found.append(jobs)
        return found

    def evidence(self):
        numbers = [int(one.token.partition(":")[2].partition("/")[0].partition(".")[0]) for one in self.ledger]
        return JobEvidence(
            ledger=self.ledger,
            results=self.results,
            stages=self.stages,
            effects=self.effects,
            published=self.published,
            redriven={},
            cancelled=self.cancelled,
            cancelled_at=self.cancelled_at,
            steps=self.steps,
            transactions=[Transaction(records.COMMITTED, "p", number, number + 1) for number in numbers],
        )


def sound():
    """A run with jobs of all tasks and fates, a chain that has ended, one that has failed, and a cancelled job."""
    run = Run()
    for kind in sorted(set(job_plan.KINDS)):
        for fate in ERRORS:
            if fate != job_plan.CONTINUING or kind in (job_plan.ATOMIC, job_plan.PATIENT):
                run.job(kind, token_of(kind, fate))
    fine = [(job_plan.ATOMIC, job_plan.FINE)]
    chain = next(
        f"p:{number}"
        for number in count()
        if all(
            job_plan.fate(job_plan.ATOMIC, f"p:{number}/{stage}.{one}") == job_plan.FINE
            for stage in range(3)
            for one in range(2)
        )
    )
    run.chain(chain, fine, fine * 2, fine)
    bad = token_of(job_plan.ATOMIC, job_plan.POISON, "p:{}/0.0").partition("/")[0]
    run.chain(bad, [(job_plan.ATOMIC, job_plan.POISON)], fine, fine)
    for fate in (job_plan.FINE, job_plan.FLAKY):
        run.job(job_plan.UNIQUE, f"p:1.unique.{fate}", token_of(job_plan.UNIQUE, fate, "u0.{}"))
    job = run.not_called("p:2.0", CANCELLED, CANCELLED_TEXT)
    run.cancelled[job], run.cancelled_at[job] = [records.CANCELLED], 500.0
    return run.evidence()


def violations(evidence):
    return {one.name: one.violations for one in job_checker.check(evidence) if not one.ok}


def with_result(evidence, job, **values):
    changed = dataclasses.replace(evidence.results[job], **values)
    return dataclasses.replace(evidence, results={**evidence.results, job: changed})


def a_job(evidence, kind, fate, *, stage=0, in_chain=False):
    """The id of a job of a task with a fate."""
    return next(
        one.job
        for one in evidence.ledger
        if (one.kind, one.stage) == (kind, stage)
        and bool(one.of) == (in_chain or kind == job_plan.UNIQUE)
        and evidence.results[one.job].last not in (CANCELLED, EARLIER)
        and job_plan.fate(kind, one.of if kind == job_plan.UNIQUE else one.token) == fate
    )
