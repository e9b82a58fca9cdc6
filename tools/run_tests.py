#!/usr/bin/env python3
"""Run the whole test suite, for ``make test``. Standard library only.

It installs missing packages, starts private database servers, runs the steps below, four at a time, and prints a
summary. A step that cannot run is reported as NOT RUN. If the environment variable CI is set, that is a failure.

All tests run on SQLite. Tests marked ``any_engine`` run only there, because they are independent of the database (pages
of the admin, settings, the supervisor's processes, documents), with both Django versions; those marked ``any_version``
(functions without a database, documents) with one. With ``--coverage``, coverage is measured with Python 3.11: in the
steps on SQLite and, of what depends on the engine, on MariaDB, without the tests in ``REPEATED``, which run the same
lines a thousand times, and without those in ``OF_TOOLS``, which test no code of the package.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent))
import servers  # beside this file

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".test"
CONFORMANCE = tuple(
    f"tests/service/test_{name}.py"
    for name in (
        "attempts",
        "clocks",
        "consumer_groups",
        "dead_letters",
        "deduplication",
        "delivery",
        "fencing",
        "idle_partitions",
        "leases",
        "ordering",
        "outcomes",
        "publish_many",
        "publishing_limits",
        "publishing_requests",
        "publishing_sql",
        "publishing_times",
        "publishing_transactions",
        "retention",
        "sequencing",
        "transaction_mismatch",
        "wakeups",
        "watermarks",
    )
)
CRASHES = (
    "tests/crash",
    "tests/jobs/test_crashes.py",
    "tests/procedures/test_crashes.py",
    "tests/schedules/test_crashes.py",
)
MODEL = ("tests/model", "tests/sql")
REPEATED = (*CRASHES, *MODEL)
LOST_CLIENTS = "tests/procedures/test_crashes.py::test_a_client_may_be_lost_after_any_statement"
# With the conformance tests, what depends most on the version of the server.
CORE = (
    *(f"tests/service/test_{name}.py" for name in ("coalescing", "cut_off", "losses", "pruning")),
    "tests/procedures",
    "tests/runtime/handling/test_ended_transactions.py",
    "tests/sql/test_grants.py",
    "tests/sql/test_plans.py",
    # A client that is lost at each statement of each procedure: on the newer version, and there by make test-slow.
    f"--deselect={LOST_CLIENTS}",
)
# Checks of the soak test, and of the alert rules by promtool. Coverage of the package would take twice their time.
OF_TOOLS = (
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/unit/test_soak_*.py")),
    "tests/metrics/test_rules.py",
)
WITH_PROCESSES = tuple(
    sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.processes" in path.read_text()
    )
)
"""The files with tests that start processes: collecting these takes a third of the time that all take."""
NOT_INHERITED = ("DATABASE_URL", "DJANGO_SETTINGS_MODULE", "PYTHONDONTWRITEBYTECODE")
"""Environment variables that steps do not get. Without bytecode on disk, each of hundreds of processes would compile
the package again, and each step would compile and rewrite all tests."""
STEPS_AT_A_TIME = 4
WAITING_AT_A_TIME = 2
"""How many of them wait for most of their time, as long as there are such steps: the others have two cores to share."""
NICENESS = 5
"""Of the steps that compute: what the others wait for happens in time even if the processors are busy."""
LONGEST_SILENCE = 600
"""Seconds after which a step that has printed nothing is stuck. There is no limit for a step as a whole, because a slow
machine is not a failure, and tests have limits of their own."""
RUNNING: list[subprocess.Popen[bytes]] = []
"""The processes of all steps that were started."""


@dataclass(frozen=True)
class Leg:
    """A Python version, with the Django version that constraints.txt selects for it."""

    name: str
    minimum: tuple[int, int]
    below: tuple[int, int]
    extras: str = "dev"

    @property
    def folder(self) -> Path:
        """The virtual environment."""
        version = ".".join(map(str, self.minimum))
        return WORK / "-".join(["venv", version, *self.extras.split(",")[1:]])

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"


OLD = Leg("Python 3.11, Django 5.2", (3, 11), (3, 12))
NEW = Leg("Python 3.12+, Django 6.1", (3, 12), (3, 15))
DECLARATIVE = Leg("Python 3.12+, Django 6.1, pandas and gRPC", (3, 12), (3, 15), "dev,pipelines")


@dataclass(frozen=True)
class Step:
    """A command of the suite."""

    name: str
    leg: Leg
    command: tuple[str, ...]
    engine: str = ""
    """One of ``servers.BUILDS``, or sqlite; empty for no database."""
    env: dict[str, str] = field(default_factory=dict)
    needs: str = ""
    """A further requirement: one of ``servers.PROGRAMS``."""
    alone: bool = False
    """Whether it needs its own server: it reads all transactions of the server, or waits for purge."""
    waits: bool = False
    """Whether it waits for most of its time: for processes, for leases, or for what its server does."""


def steps(*, measured: bool) -> list[Step]:
    """Return the steps of ``make test``; if ``measured``, with coverage."""
    # The packaging tests build and install the distribution, and the browser tests open every page: each runs once.
    timed = ("-m", "pytest", "-q", "--durations=30", "-m")
    # A Spark session takes seconds to start and gigabytes to install, so its tests are separate steps.
    everything = (*timed, "not packaging and not browser and not spark and not slow and not own_server")
    without_repeated = tuple(f"--ignore={name}" for name in REPEATED)
    without_tools = tuple(f"--ignore={name}" for name in OF_TOOLS)
    in_process = (*timed, everything[-1] + " and not processes")
    of_any_version = (*timed, in_process[-1] + " and not any_version")
    any_engine = (*timed, in_process[-1] + " and any_engine")
    of_the_engine = (*timed, in_process[-1] + " and not any_engine")
    most_of_the_engine = (*of_the_engine, *without_repeated, "--ignore=tests/admin")
    with_processes = everything[-1] + " and processes"
    processes = (*timed, with_processes, *WITH_PROCESSES)
    processes_of_the_engine = (*timed, with_processes + " and not any_engine", *WITH_PROCESSES)
    coverage = ("-m", "coverage", "run") if measured else ()
    pipeline = (*timed, "spark and not slow", "tests/pipeline")
    pipeline_of_the_engine = (*timed, "spark and not slow and not any_engine", "tests/pipeline")
    packaging = (*timed, "packaging", "tests/packaging")
    browser = (*timed, "browser", "tests/browser", "tests/pipeline")
    alone = ("tests/interleavings", "tests/sql", "tests/crash", "tests/inspection")
    own_server = (*timed, "own_server", *alone)
    own_server_of_the_engine = (*timed, "own_server and not any_engine", *alone)
    # Warnings are errors, including those about references that do not resolve.
    docs = ("-m", "sphinx", "-q", "-E", "-n", "-W", "--keep-going", "-d", ".test/doctrees", "docs", ".test/docs")
    repeatable = {"TEST_ISOLATION": "repeatable read"}
    # The longest first, so that the last ones are short.
    return [
        *lint_steps(),
        Step("docs", NEW, docs),
        Step("processes of the engine, MySQL", NEW, processes_of_the_engine, "mysql", needs="node", waits=True),
        Step("processes of the engine, MariaDB", OLD, processes_of_the_engine, "mariadb", needs="node", waits=True),
        Step("interleavings, plans, lasting sessions, MariaDB", OLD, own_server, "mariadb", alone=True, waits=True),
        Step(
            "interleavings, plans, lasting sessions, MySQL",
            NEW,
            own_server_of_the_engine,
            "mysql",
            alone=True,
            waits=True,
        ),
        Step("processes, SQLite", OLD, (*coverage, *processes), "sqlite", waits=True),
        # What pages read is tested there in tests/inspection, and pages with both versions of Django on SQLite.
        Step("most of the engine, MariaDB", OLD, (*coverage, *most_of_the_engine), "mariadb"),
        Step("most of the engine, MySQL", NEW, most_of_the_engine, "mysql"),
        Step("any engine, SQLite", OLD, (*coverage, *any_engine, *without_tools), "sqlite"),
        Step("suite, SQLite", NEW, (*of_any_version, *without_repeated), "sqlite"),
        Step("browser, SQLite", NEW, browser, "sqlite", needs="browser"),
        # They fork at each statement, which takes longer in a process that has collected everything.
        Step("crash points, MariaDB", OLD, (*of_the_engine, *CRASHES), "mariadb", {"TEST_CRASHES": "kill"}),
        Step("crash points, MySQL", NEW, (*of_the_engine, *CRASHES), "mysql", {"TEST_CRASHES": "cut"}),
        Step("model and plans, MySQL", NEW, (*of_the_engine, *MODEL), "mysql"),
        Step("model and plans, MariaDB", OLD, (*of_the_engine, *MODEL), "mariadb"),
        Step("crash points, model and plans, SQLite", NEW, (*of_any_version, *REPEATED), "sqlite"),
        Step("pipeline, SQLite", OLD, (*coverage, *pipeline), "sqlite", needs="java"),
        Step("pipeline of the engine, MariaDB", NEW, pipeline_of_the_engine, "mariadb", needs="java"),
        Step("pipeline of the engine, MySQL", NEW, pipeline_of_the_engine, "mysql", needs="java"),
        Step("core, MariaDB 10.11", OLD, (*of_the_engine, *CONFORMANCE, *CORE), "mariadb-10.11"),
        Step("packaging and tutorial", OLD, packaging, needs="java"),
        Step("tools, SQLite", OLD, (*any_engine, *OF_TOOLS), "sqlite", needs="promtool"),
        Step("pages, SQLite", OLD, (*coverage, *of_the_engine, "tests/admin"), "sqlite"),
        Step("conformance, MySQL", OLD, (*everything, *CONFORMANCE), "mysql"),
        Step("conformance, MariaDB at REPEATABLE READ", NEW, (*everything, *CONFORMANCE), "mariadb", repeatable),
        Step("conformance, SQLite", OLD, (*everything, *CONFORMANCE), "sqlite"),
        Step("demo, SQLite", OLD, ("manage.py", "demo", "--events", "2000"), "sqlite", {"DEMO": "1"}),
    ]


def lint_steps() -> list[Step]:
    return [
        Step("lint", NEW, ("-m", "ruff", "check", ".")),
        Step("format", NEW, ("-m", "ruff", "format", "--check", ".")),
        Step("types", NEW, ("-m", "mypy")),
        Step("imports", NEW, ("-c", "from importlinter.cli import lint_imports_command as lint; lint()")),
        Step("shared modules", NEW, ("tools/shared_modules.py", "--check")),
    ]


def check_steps() -> list[Step]:
    """What ``make check`` runs in about three minutes: on SQLite, what most changes break first.

    Without what waits in real time, starts processes, plays long or random histories, or repeats itself for each page,
    operation, function, state or statement. ``make test`` runs that too.
    """
    quick: tuple[str, ...] = (
        *("-m", "pytest", "-q", "-m"),
        "not processes and not packaging and not browser and not spark and not slow and not own_server",
    )
    left_out = (
        *OF_TOOLS,
        *("tests/admin/test_databases.py", "tests/admin/test_error_texts.py", "tests/admin/test_filter_labels.py"),
        *("tests/admin/test_hostile.py", "tests/admin/test_topic_permissions.py"),
        *("tests/databases/test_no_database.py", "tests/databases/test_relay_failovers.py"),
        *("tests/inspection/test_agreement.py", "tests/inspection/test_histories.py"),
        *("tests/runtime/handling/test_timeouts.py", "tests/runtime/polling/test_breakdowns.py"),
        *("tests/service/test_handler_discovery.py", "tests/service/test_kept_threads.py"),
        "tests/service/test_slot_waits.py",
        *("tests/unit/test_arguments.py", "tests/unit/test_inbox_machine.py"),
    )
    deselected = (
        "tests/service/test_priorities.py::test_subsets_are_those_of_keys",
        "tests/service/test_strict_order.py::test_hundreds_of_subscribers_share_and_take_over",
        "tests/service/test_strict_order.py::test_nothing_starts_before_what_is_before_it_has_ended",
        *(
            f"tests/unit/test_filter_policies.py::{name}"
            for name in (
                "test_hostile_metadata_is_harmless",
                "test_no_metadata_raises_an_exception_and_the_explanation_agrees",
                "test_or_is_or_and_keys_are_and",
                "test_the_canonical_form_is_the_same_policy",
            )
        ),
        "tests/unit/test_timetables.py::test_the_latest_ticks_are_the_last_of_all",
    )
    quick = (*quick, *(f"--ignore={name}" for name in left_out), *(f"--deselect={name}" for name in deselected))

    def tests(*names: str) -> tuple[str, ...]:
        return (*quick, *(f"tests/{name}" for name in names))

    # All but the last are run at the same time, so they should take equally long.
    return [
        Step("protocol, SQLite", NEW, tests("service", "operations"), "sqlite"),
        Step("runtime and commands, SQLite", NEW, tests("runtime", "management", "metrics", "databases"), "sqlite"),
        Step("inspection and dashboard, SQLite", NEW, tests("inspection", "admin"), "sqlite"),
        Step("units and documents, SQLite", NEW, tests("unit", "docs"), "sqlite"),
        *lint_steps(),
    ]


def slow_steps() -> list[Step]:
    """Return the steps of ``make test-slow``.

    They are repeated kills of the archive, every way in which a connection ends at every statement, server settings,
    pages of Django 5.2 in a browser, rolling upgrades and declarative pipelines.
    """
    command = ("-m", "pytest", "-q", "-s", "-m", "slow", "tests/pipeline/test_faults.py")
    declarative = ("-m", "pytest", "-q", "-m", "slow", "tests/pipeline/test_declarative.py")
    settings = ("-m", "pytest", "-q", "tests/faults/test_server_settings.py")
    upgrades = ("-m", "pytest", "-q", "-m", "slow", "tests/upgrades")
    # The admin's pages differ between Django versions. The operations on them do not.
    pages = ("-m", "pytest", "-q", "-m", "browser", "tests/browser/test_pages.py")
    on_servers = (("MariaDB", OLD, "mariadb"), ("MySQL", NEW, "mysql"))
    legs = (*on_servers, ("SQLite", NEW, "sqlite"))
    return [
        *(Step(f"kills of the archive, {name}", leg, command, engine, needs="java") for name, leg, engine in legs),
        *(
            Step(f"crash points, {name}", leg, ("-m", "pytest", "-q", "-m", "not own_server", *CRASHES), engine)
            for name, leg, engine in on_servers
        ),
        Step("lost clients, MariaDB 10.11", OLD, ("-m", "pytest", "-q", LOST_CLIENTS), "mariadb-10.11"),
        *(Step(f"server settings, {name}", leg, settings, engine) for name, leg, engine in on_servers),
        Step("browser, MariaDB", OLD, pages, "mariadb", needs="browser"),
        *(Step(f"rolling upgrades, {name}", leg, upgrades, engine) for name, leg, engine in on_servers),
        Step("declarative pipeline, MariaDB", DECLARATIVE, declarative, "mariadb", needs="java"),
    ]


@dataclass
class Result:
    step: Step
    ok: bool
    seconds: float
    detail: str
    cpu: float = 0.0
    """Seconds of CPU time of the step's processes, without the database server's."""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    not_run: bool = False


# -- interpreters -------------------------------------------------------------


def find_python(leg: Leg) -> str | None:
    """Return a working interpreter of the leg's version: this one, one on PATH, or one of pyenv."""
    candidates = [sys.executable]
    for minor in range(leg.below[1] - 1, leg.minimum[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        candidates += [found] if found else []
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [str(path) for path in sorted(pyenv.glob("3.*/bin/python"), reverse=True)]
    for candidate in candidates:
        code = "import sys; print('%d %d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode == 0 and leg.minimum <= tuple(map(int, done.stdout.split())) < leg.below:
            return candidate
    return None


def prepare(leg: Leg) -> Path:
    """Create the leg's virtual environment and install all packages. Return its interpreter.

    Raises:
        servers.NotAvailable: No interpreter was found, or the installation failed.
    """
    python = find_python(leg)
    if python is None:
        raise servers.NotAvailable(f"no interpreter for {leg.name} was found on PATH or in pyenv")
    folder, interpreter = leg.folder, leg.interpreter
    constraints = ROOT / "constraints.txt"
    stamp = folder / "installed"
    wanted = "".join(
        path.read_text() for path in (constraints, ROOT / "pyproject.toml", ROOT / "spark" / "pyproject.toml")
    )
    if stamp.exists() and stamp.read_text() == wanted:
        return interpreter
    shutil.rmtree(folder, ignore_errors=True)
    for command in (
        [python, "-m", "venv", str(folder)],
        [
            *(str(interpreter), "-m", "pip", "install", "-q", "-c", str(constraints)),
            *("-e", str(ROOT / "spark"), "-e", f"{ROOT}[{leg.extras}]"),
        ],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise servers.NotAvailable(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    stamp.write_text(wanted)
    return interpreter


# -- preparing ----------------------------------------------------------------


class Requirements:
    """What the steps need. All of it is prepared at the same time, and each step waits only for its own part."""

    def __init__(self, chosen: list[Step], stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(max_workers=12))
        self._headers = self._pool.submit(self._install_headers)
        self._legs = {leg: self._pool.submit(self._prepare, leg) for leg in dict.fromkeys(step.leg for step in chosen)}
        shared = {step.engine for step in chosen if not step.alone} & set(servers.BUILDS)
        self._urls = {engine: self._pool.submit(self._url, engine) for engine in sorted(shared)}
        self._needs = {
            name: self._pool.submit(self._lack, name, install)
            for name, install in servers.PROGRAMS.items()
            if any(step.needs == name for step in chosen)
        }
        self._pool.submit(self._announce, time.monotonic())

    def interpreter(self, leg: Leg) -> Path | str:
        """Return the interpreter of a leg, or the reason why there is none."""
        return self._legs[leg].result()

    def url(self, engine: str) -> str:
        """Return the URL of an engine's shared server, or the reason why there is none."""
        return self._urls[engine].result()

    def lack(self, need: str) -> str:
        """Return the reason why a requirement is missing, or an empty string."""
        return self._needs[need].result() if need else ""

    def _announce(self, began: float) -> None:
        futures: list[concurrent.futures.Future[Any]] = [*self._legs.values(), *self._urls.values()]
        concurrent.futures.wait([*futures, *self._needs.values()])
        print(f"Setup took {time.monotonic() - began:.0f} s.", flush=True)

    @staticmethod
    def _install_headers() -> None:
        try:
            servers.apt_install(servers.DRIVER_PACKAGES)
        except servers.NotAvailable as error:
            print(f"The driver's headers cannot be installed: {error}", file=sys.stderr)

    def _prepare(self, leg: Leg) -> Path | str:
        self._headers.result()  # pip compiles mysqlclient
        try:
            return prepare(leg)
        except servers.NotAvailable as error:
            return str(error)

    def _url(self, engine: str) -> str:
        """Servers are private unless the environment names one."""
        if given := servers.given_url(engine):
            return given
        try:
            servers.install(engine)
            return self._stack.enter_context(servers.running(engine, extra=EXTRA[engine], in_memory=True)).url
        except servers.NotAvailable as error:
            return f"{engine} is not available: {error}"

    @staticmethod
    def _lack(name: str, install: Callable[[], object]) -> str:
        try:
            install()
        except servers.NotAvailable as error:
            return f"{name} is not available: {error}"
        return ""


# -- running ------------------------------------------------------------------


class Turns:
    """Which step is next: two of those that wait are run beside two of the others, as long as there are both."""

    def __init__(self, chosen: list[Step]) -> None:
        self._left = dict(enumerate(chosen, 1))
        self._waiting = 0
        self._lock = threading.Lock()

    def run_next(self, requirements: Requirements) -> tuple[int, Result]:
        """Run a step that has not begun. Return its number and its result."""
        with self._lock:
            waits = self._waiting < WAITING_AT_A_TIME
            number = next((number for number, step in self._left.items() if step.waits == waits), min(self._left))
            step = self._left.pop(number)
            self._waiting += step.waits
        try:
            return number, run(step, number, requirements)
        finally:
            with self._lock:
                self._waiting -= step.waits


def run(step: Step, number: int, requirements: Requirements) -> Result:
    """Run a step, on its own server if it needs one."""
    if not step.alone:
        return run_on(step, number, requirements, requirements.url(step.engine) if step.engine in EXTRA else "")
    try:
        servers.install(step.engine)
        with servers.running(step.engine, extra=EXTRA[step.engine], in_memory=True) as server:
            return run_on(step, number, requirements, server.url)
    except servers.NotAvailable as error:
        return run_on(step, number, requirements, f"{step.engine} is not available: {error}")


def run_on(step: Step, number: int, requirements: Requirements, url: str) -> Result:
    """Run a step on a server; ``url`` is empty if it needs none, or says why there is none."""
    interpreter = requirements.interpreter(step.leg)
    if isinstance(interpreter, str):
        return Result(step, ok=False, seconds=0, detail=interpreter, not_run=True)
    if lack := requirements.lack(step.needs):
        return Result(step, ok=False, seconds=0, detail=lack, not_run=True)
    env = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    env |= step.env | {"COVERAGE_FILE": str(WORK / "coverage" / "data"), "PYTHONUNBUFFERED": "1"}
    if step.engine in servers.BUILDS:
        if not url.startswith("mysql://"):
            return Result(step, ok=False, seconds=0, detail=url, not_run=True)
        # Several steps run at a time, so each has its own test database.
        env["DATABASE_URL"] = urlsplit(url)._replace(path=f"/step{number}").geturl()
    elif step.engine == "sqlite":
        folder = WORK / "sqlite"
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"step{number}[._]*"):
            leftover.unlink()
        env["TEST_SQLITE_FILE"] = str(folder / f"step{number}.sqlite3")
        if "DEMO" in step.env:
            env["DATABASE_URL"] = f"sqlite:///{folder}/step{number}.sqlite3"
    command = step.command
    if "pytest" in command:
        command = (*command, f"--junitxml={WORK / 'junit' / f'{number:02}.xml'}")
    log = WORK / "logs" / f"{number:02}-{re.sub(r'[^a-z0-9]+', '-', step.name.lower())}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("w") as output:
        if "DEMO" in step.env:
            subprocess.run(
                [str(interpreter), "manage.py", "migrate", "-v", "0"],
                cwd=ROOT,
                env=env,
                stdout=output,
                stderr=output,
                check=False,
            )
        try:
            process = subprocess.Popen(
                [*([] if step.waits else ["nice", "-n", str(NICENESS)]), str(interpreter), *command],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            RUNNING.append(process)
            code, cpu = wait(process, log)
        except subprocess.TimeoutExpired:
            process.kill()
            code, cpu = wait(process, log)
            output.write(f"\nThe step printed nothing for {LONGEST_SILENCE} s.\n")
    text = log.read_text(errors="replace")
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|error|skipped)", text[-3000:])}
    result = Result(
        step,
        ok=code == 0,
        seconds=time.monotonic() - began,
        cpu=cpu,
        detail="" if code == 0 else f"exit status {code}; the end of {log.relative_to(ROOT)}:\n{text[-12_000:]}",
        passed=counts.get("passed", 0),
        failed=counts.get("failed", 0) + counts.get("error", 0),
        skipped=counts.get("skipped", 0),
    )
    print(f"{'ok    ' if result.ok else 'FAILED'} {step.name} ({step.leg.name}): {result.seconds:.0f} s", flush=True)
    return result


def wait(process: subprocess.Popen[bytes], log: Path) -> tuple[int, float]:
    """Return a process's exit code, and the CPU time in seconds of it and of the processes that it waited for.

    Raises:
        subprocess.TimeoutExpired: The process has written nothing into the log for ``LONGEST_SILENCE`` seconds.
    """
    size, deadline = 0, time.monotonic() + LONGEST_SILENCE
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_utime + usage.ru_stime
        if log.stat().st_size != size:
            size, deadline = log.stat().st_size, time.monotonic() + LONGEST_SILENCE
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(process.args, LONGEST_SILENCE)
        time.sleep(0.1)


# Tests read MySQL's locks, but not its statistics, which would take 10 % more time.
EXTRA = {
    "mariadb": (),
    "mariadb-10.11": (),
    "mysql": ("--performance-schema=ON", "--performance-schema-instrument=%=OFF"),
}


def main() -> int:
    servers.end_servers_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="run only steps whose name contains TEXT")
    parser.add_argument("--slow", action="store_true", help="run the slow steps instead")
    parser.add_argument("--check", action="store_true", help="run the quick steps instead, without a server")
    parser.add_argument("--coverage", action="store_true", help="measure coverage, which takes a tenth longer")
    options = parser.parse_args()
    known = slow_steps() if options.slow else check_steps() if options.check else steps(measured=options.coverage)
    chosen = [step for step in known if not options.only or options.only.lower() in step.name.lower()]
    began = time.monotonic()
    for folder in ("coverage", "junit"):
        shutil.rmtree(WORK / folder, ignore_errors=True)
        (WORK / folder).mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        requirements = Requirements(chosen, stack)
        turns = Turns(chosen)
        with concurrent.futures.ThreadPoolExecutor(STEPS_AT_A_TIME) as pool:
            jobs = [pool.submit(turns.run_next, requirements) for _ in chosen]
            try:
                found = dict(job.result() for job in jobs)
                results = [found[number] for number in sorted(found)]
            except BaseException:  # SIGTERM or Ctrl-C: end the steps too
                pool.shutdown(wait=False, cancel_futures=True)
                for process in RUNNING:
                    process.terminate()
                raise
    coverage = coverage_report(OLD.interpreter)
    return summary(results, coverage, time.monotonic() - began)


def coverage_report(interpreter: Path) -> str:
    if not list((WORK / "coverage").glob("data*")):
        return ""
    env = os.environ | {"COVERAGE_FILE": str(WORK / "coverage" / "data")}
    subprocess.run([str(interpreter), "-m", "coverage", "combine", "-q"], cwd=ROOT, env=env, check=False)
    done = subprocess.run(
        [str(interpreter), "-m", "coverage", "report"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    (WORK / "logs" / "coverage.txt").write_text(done.stdout)
    return next((line for line in done.stdout.splitlines() if line.startswith("TOTAL")), "no data")


def slowest_files(count: int = 10) -> list[str]:
    """Return a line for each of the test files that took longest, over all steps."""
    seconds: dict[str, float] = {}
    tests: dict[str, int] = {}
    steps: dict[str, set[Path]] = {}
    for path in (WORK / "junit").glob("*.xml"):
        for case in ElementTree.parse(path).iter("testcase"):  # noqa: S314  # pytest wrote it
            name = re.sub(r"\.[A-Z]\w*$", "", case.get("classname", "")).replace(".", "/") + ".py"
            seconds[name] = seconds.get(name, 0) + float(case.get("time", 0))
            tests[name] = tests.get(name, 0) + 1
            steps.setdefault(name, set()).add(path)
    longest = sorted(seconds, key=lambda name: -seconds[name])[:count]
    return [f"{seconds[name]:6.0f} s  {name:54}{tests[name]:5} tests in {len(steps[name])} steps" for name in longest]


def summary(results: list[Result], coverage: str, seconds: float) -> int:
    strict = bool(os.environ.get("CI"))
    for result in results:
        if not result.ok:
            print(f"\n--- {result.step.name} ({result.step.leg.name}) ---\n{result.detail}")
    print("\nSummary")
    for result in results:
        state = "NOT RUN" if result.not_run else "ok" if result.ok else "FAILED"
        tests = f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped" if result.passed else ""
        times = f"{result.seconds:5.0f} s  CPU {result.cpu:4.0f} s"
        print(f"  {state:8}{result.step.name:48}{result.step.leg.name:26}{times}  {tests}")
    if longest := slowest_files():
        print("\nSlowest test files")
        print("\n".join(f"  {line}" for line in longest))
    if coverage:
        print(f"\n  coverage (branches included): {coverage}")
    passed, failed = sum(one.passed for one in results), sum(one.failed for one in results)
    bad = [one for one in results if not one.ok and (strict or not one.not_run)]
    print(f"  Total: {seconds:.0f} s. The logs are in .test/logs.\n")
    if passed or bad:
        print(f"{passed} passed, {max(failed, len(bad))} failed, {sum(one.skipped for one in results)} skipped")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
