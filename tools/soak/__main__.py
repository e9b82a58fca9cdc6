"""Run the soak test: start a private server, publishers, subscribers and a killer, then check the results.

checker.py has the checks, plan.py the disturbances. If a check fails, the exit status is 1 and the folder with the
logs, the handlers' records and the server's data is kept.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import django
import servers

from soak import checker, job_checker, logs, plan, records, schedule_checker
from soak.fleet import Fleet
from soak.job_facts import JobEvidence

if TYPE_CHECKING:
    from soak.monitor import Monitor

DURABLE = ("--innodb-flush-log-at-trx-commit=1",)
PRINT_DEADLOCKS = "--innodb-print-all-deadlocks=ON"
ENGINE_OPTIONS = {
    "mariadb": (*DURABLE, PRINT_DEADLOCKS),
    # MySQL prints deadlocks as notes.
    "mysql": (*DURABLE, PRINT_DEADLOCKS, "--log-error-verbosity=3", "--sync-binlog=1"),
}
PUBLISHERS, THREADS = 8, 4
"""Publisher processes and threads per process. One of the 32 publishers runs long transactions in its own process."""
PRODUCERS, PRODUCER_THREADS = 2, 3
"""Processes that enqueue jobs, and threads per process."""
JOBS = 0.06
"""Number of transactions with jobs for each message that is published."""
LONG = 60.0
"""Seconds that a long transaction stays open."""
SUBSCRIBERS: dict[str, tuple[str, ...]] = {
    "supervised": ("--processes", "2", "--threads", "2"),
    "steady": ("--threads", "3"),
    "second": ("--threads", "3"),
    "atomic-only": (*(f"--group={name}" for name in ("atomic", "batch", "relayed-atomic")), "--threads", "2"),
    "small-batches": (
        *(
            f"--group={group.name}"
            for group in plan.GROUPS
            if group.name not in ("atomic", "batch", "filtered", "relayed-atomic", "moved-atomic")
        ),
        "--claim-size",
        "10",
    ),
}
PROCESSES = sum(
    int(more[more.index("--processes") + 1]) if "--processes" in more else 1 for more in SUBSCRIBERS.values()
)
CLIENTS = 2
"""Clients in plain SQL."""
SPARED = "steady"
DRAIN_PATIENCE = 150.0
"""Seconds without progress after which a queue counts as stuck. The last settled rows may wait for housekeeping."""
PATIENCE = 60.0
"""Additional seconds for the move of a topic in a short run."""
COVERAGE_MINUTES = 3.0
"""Runs of at least this length must have had every kind of disturbance."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="duration in minutes (default: 10)")
    parser.add_argument("--engine", choices=servers.ENGINES, default="mariadb", help="server (default: mariadb)")
    parser.add_argument("--rate", type=float, default=80.0, help="messages published per second (default: 80)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the disturbances (default: random)")
    parser.add_argument(
        "--report", type=Path, default=Path(".test/soak"), help="folder for the report (default: .test/soak)"
    )
    return parser.parse_args()


def main() -> int:
    options = arguments()
    options.seed = options.seed if options.seed is not None else random.randrange(10**6)
    servers.end_servers_on_sigterm()
    folder = Path(tempfile.mkdtemp(prefix="mysqlqueue-soak-"))
    (folder / "traps").mkdir()
    print(f"Soak test: {options.engine}, {options.minutes:g} minutes, seed {options.seed}, in {folder}", flush=True)
    ok = False
    try:
        servers.install(options.engine)
        with servers.running(options.engine, extra=ENGINE_OPTIONS[options.engine]) as server:
            try:
                ok = Soak(options, folder, server).run()
            finally:
                options.report.mkdir(parents=True, exist_ok=True)
                shutil.copy(server_log(server), options.report / f"soak-{options.engine}-server.log")
                if not ok:
                    server.stop()
                    shutil.copytree(server.folder / "data", folder / "data")
                    shutil.copy(server_log(server), folder)
                    print(f"The logs, the handlers' records and the server's data are kept in {folder}.")
    except servers.NotAvailable as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    if ok:
        shutil.rmtree(folder)
    return 0 if ok else 1


class Soak:
    """A run of the soak test."""

    def __init__(self, options: argparse.Namespace, folder: Path, server: servers.Server) -> None:
        self.options = options
        self.folder = folder
        self.server = server
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "soak.settings",
            "SOAK_FOLDER": str(folder),
            "SOAK_SOCKET": str(server.socket),
        }
        django.setup()
        self.fleet = Fleet(folder, os.environ)

    def run(self) -> bool:
        from soak import evidence, job_evidence

        self.server.execute(f"CREATE DATABASE mysqlqueue_{plan.OTHER} CHARACTER SET utf8mb4")
        for alias in plan.ALIASES:
            self._django("migrate", verbosity=0, database=alias)
        self._django("queueprocedures", verbosity=0)
        evidence.create_tables(job_evidence.TABLES)
        try:
            return self._run()
        finally:
            self.fleet.close()

    def _run(self) -> bool:
        from django.db import connections

        from soak import evidence, job_evidence, moments, report, schedule_evidence
        from soak.killer import Killer
        from soak.monitor import Monitor
        from soak.mover import Mover

        seconds = self.options.minutes * 60
        self._start_fleet()
        killer = Killer(plan.actions(self.options.seed, seconds), self.fleet, self.server, self.folder)
        monitor = Monitor(self.fleet, self.folder)
        mover = Mover(self.fleet, self.folder, self.options.seed, seconds, monitor.forget)
        began = time.monotonic()
        say = progress_line(monitor)

        def is_over() -> bool:
            """Return whether to stop: in time, but on a slow machine only after every kind of disturbance."""
            lasted = time.monotonic() - began
            is_complete = mover.is_done and not self._untried(killer.counts)
            return lasted >= seconds and (is_complete or lasted >= 2 * seconds + PATIENCE)

        self._turn_until(is_over, killer.turn, monitor.turn, mover.turn, say)
        lasted = time.monotonic() - began
        killer.settle()
        connections.close_all()  # the killer may have cut them
        ending = schedule_evidence.Ending()
        self._turn_until(ending.is_over, monitor.turn, say)
        (self.folder / "stop-publishing").touch()
        unclean = self.fleet.stop(self.fleet.publishers)
        stopped = time.monotonic()

        def is_drained_or_stuck() -> bool:
            stuck = min(monitor.stuck_for(), time.monotonic() - stopped)
            return evidence.is_drained() or stuck > DRAIN_PATIENCE

        self._turn_until(is_drained_or_stuck, monitor.turn, say)
        took = time.monotonic() - stopped
        unclean += self.fleet.stop([*self.fleet.subscribers, *self.fleet.clients])
        unclean += [f"{slot.name} {end}" for slot in self.fleet.slots for end in slot.ends]
        findings = logs.read_all(
            {path.name: path.read_text(errors="replace").splitlines() for path in sorted(self.folder.glob("*.log"))}
        )
        gathered = evidence.gather(self.folder, monitor.progress, [*killer.troubles, *mover.troubles])
        jobs = job_evidence.gather(self.folder, [*killer.troubles, *mover.troubles])
        schedules = schedule_evidence.gather(self.folder, jobs.results, ending.settled_at, monitor.schedules)
        moved = report.moved(gathered)
        verdicts = [
            *checker.check(gathered, plan.GROUPS),
            *(one.verdict() for one in monitor.moments.values()),
            *(
                moments.check_leftovers(moments.snapshot(alias), evidence.lags(), plan.GROUPS, alias)
                for alias in plan.ALIASES
            ),
            *(
                checker.check_retention(gathered.ledger, evidence.collect_garbage(alias), plan.RETENTION * 1000)
                for alias in plan.ALIASES
            ),
            *job_checker.check(jobs),
            monitor.jobs.verdict(),
            *schedule_checker.check(schedules),
            checker.check_memory(monitor.memory),
            *findings.verdicts(logs.bounds(killer.troubles, PROCESSES * len(plan.ALIASES))),
            checker.verdict("no process ended unexpectedly", f"{len(self.fleet.slots)} slots", unclean),
            checker.verdict(
                "a topic moved while its messages were published and handled",
                f"{moved}",
                [what for what, count in {**moved, "end of the move": mover.is_done}.items() if not count],
            ),
            self._coverage(killer.counts, gathered, jobs),
        ]
        result = report.Report(
            command=f"make soak MINUTES={self.options.minutes:g} ENGINE={self.options.engine} SEED={self.options.seed}",
            engine=self.options.engine,
            version=str(evidence.rows("SELECT VERSION()")[0][0]),
            machine=f"{os.cpu_count()} cores, Python {platform.python_version()}, Django {django.__version__}",
            seed=self.options.seed,
            seconds=round(lasted, 1),
            drained_after=round(took, 1),
            done_to_it={kind: killer.counts[kind] for kind in plan.ACTIONS},
            downtimes=[(round(since, 1), round(to, 1)) for since, to in killer.downtimes],
            restarts={slot.name: slot.starts - 1 for slot in self.fleet.slots},
            traffic=report.traffic(gathered),
            groups=report.groups(gathered),
            jobs=report.jobs(jobs),
            move={**mover.report(), **moved},
            samples=monitor.samples,
            memory=monitor.memory,
            log_events=dict(findings.events),
            database_errors=dict(findings.codes),
            server_deadlocks=logs.server_deadlocks(server_log(self.server).read_text(errors="replace").splitlines()),
            verdicts=verdicts,
        )
        (self.folder / "killer.log").write_text("".join(f"{event}\n" for event in killer.events))
        print(f"\n{result.as_markdown()}")
        for path in result.write(self.options.report):
            print(f"Wrote {path}")
        return result.ok

    def _start_fleet(self) -> None:
        from soak import evidence

        for name, more in SUBSCRIBERS.items():
            command = ("-m", "django", "runsubscriber", "--name", name, *more)
            self.fleet.add(name, *command, spared=name == SPARED)
        for number in range(CLIENTS):
            self.fleet.add(f"client-{number}", "-m", "soak.sql_client", client=True)
        for slot in self.fleet.slots:
            wait_for(lambda slot=slot: self.fleet.has_started(slot))  # type: ignore[misc]
        publisher = ("-m", "soak.publisher")
        seed = str(self.options.seed)
        for number in range(PUBLISHERS):
            threads = THREADS - (number == 0)
            rate = f"{self.options.rate / (PUBLISHERS * THREADS - 1) * threads:.2f}"
            more = (f"p{number}", seed, "--threads", str(threads), "--rate", rate)
            self.fleet.add(f"publisher-{number}", *publisher, *more, publisher=True)
        long = min(LONG, self.options.minutes * 60 / 4)
        self.fleet.add("publisher-long", *publisher, "long", seed, "--long", f"{long:g}", publisher=True, spared=True)
        for number in range(PRODUCERS):
            rate = f"{self.options.rate * JOBS / PRODUCERS:.2f}"
            more = (f"j{number}", seed, "--threads", str(PRODUCER_THREADS), "--rate", rate)
            self.fleet.add(f"producer-{number}", "-m", "soak.job_producer", *more, publisher=True)
        wait_for(lambda: evidence.committed() > 0)

    def _turn_until(self, done: Callable[[], bool], *turns: Callable[[], None]) -> None:
        while not done():
            self.fleet.tend()
            for turn in turns:
                turn()
            time.sleep(0.1)

    def _untried(self, counts: Counter[str]) -> list[str]:
        if self.options.minutes < COVERAGE_MINUTES:
            return []
        return [kind for kind in plan.ACTIONS if not counts[kind]]

    def _coverage(self, counts: Counter[str], gathered: checker.Evidence, jobs: JobEvidence) -> checker.Verdict:
        """Check that every kind of disturbance occurred: a run without any proves nothing."""
        missing = self._untried(counts)
        if not gathered.ledger:
            missing.append("publishing")
        if not jobs.ledger:
            missing.append("enqueueing of jobs")
        asked = self.options.minutes >= COVERAGE_MINUTES
        if asked and not gathered.refused:
            missing.append("messages that the log refuses")
        for group in plan.SQL_GROUPS if asked else ():
            started = [one.process.endswith(records.SQL) for one in gathered.steps[group.name]]
            for is_client, who in ((True, "clients in plain SQL"), (False, "subscribers")):
                if is_client not in started:
                    missing.append(f"work of {who} for {group.name}")
        compared = f"{len(plan.ACTIONS)} kinds of disturbance" if asked else "not checked in a run this short"
        return checker.verdict("every kind of disturbance occurred", compared, [f"{kind}: never" for kind in missing])

    def _django(self, command: str, **options: object) -> None:
        from django.core.management import call_command

        call_command(command, **options)


def server_log(server: servers.Server) -> Path:
    """Return the path of the log of a server, of all its starts."""
    return server.folder / "server.log"


def progress_line(monitor: Monitor) -> Callable[[], None]:
    """Return a function that prints every fourth sample."""
    said = 0

    def say() -> None:
        nonlocal said
        if len(monitor.samples) >= said + 4:
            said = len(monitor.samples)
            sample = monitor.samples[-1]
            print(f"{sample.at:6.0f} s  {sample.committed:7} messages committed, lag {sample.lags}", flush=True)

    return say


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("a process of the soak test did not start; see its log")
        time.sleep(0.1)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
