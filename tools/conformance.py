#!/usr/bin/env python3
"""Test task backends against Django's documentation, and write docs/reference/task-backends.md.

    python tools/conformance.py run            run tests/tasks_conformance for each backend, Django version and engine
    python tools/conformance.py run --only X   run it for one backend; the results of the others stay
    python tools/conformance.py own-tests      run the tests of django-tasks-db with this package's backend
    python tools/conformance.py page           write the page from the stored results
    python tools/conformance.py page --check   change nothing; exit with 1 if the page is out of date

``run`` and ``own-tests`` install each package into virtual environments in a temporary folder, with the versions of
constraints.txt and benchmarks/rivals/requirements.txt, start private database servers, and store what they found in
tests/tasks_conformance/results.json. They need the network, and Python 3.12 or later for django-ox. Standard library
only.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent))
import run_tests  # beside this file
import servers
import tasks_db_tests

ROOT = Path(__file__).resolve().parent.parent
SUITE = ROOT / "tests" / "tasks_conformance"
RESULTS = SUITE / "results.json"
PAGE = ROOT / "docs" / "reference" / "task-backends.md"
OURS, IMMEDIATE, TASKS_DB, OX = "django-mysqlqueue", "ImmediateBackend", "django-tasks-db", "django-ox"
DJ_QUEUE = "dj-queue"
RIVALS = {TASKS_DB: "django_tasks_db", OX: "django_ox", DJ_QUEUE: "dj_queue"}
"""By distribution, its app."""
BACKENDS = (OURS, IMMEDIATE, *RIVALS)
ENGINES = ("mariadb", "mysql", "sqlite")
TITLES = {"mariadb": "MariaDB", "mysql": "MySQL", "sqlite": "SQLite"}
DJANGO_60 = "6.0.10"
"""The only Django version that neither constraints.txt nor the comparison of speeds pins."""
TESTING = ("django-environ", "mysqlclient", "pytest", "pytest-django", "pytest-timeout", "tqdm")
"""Distributions that the suite needs."""


# -- environments -------------------------------------------------------------


def pins() -> dict[str, str]:
    """Return the pinned version of each distribution, with the newest Django."""
    files = (ROOT / "constraints.txt", ROOT / "benchmarks" / "rivals" / "requirements.txt")
    text = "".join(file.read_text() for file in files)
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))


def djangos() -> tuple[str, str, str]:
    """Return the Django versions under test."""
    pinned = re.findall(r"^Django==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return min(pinned), DJANGO_60, pins()["Django"]


def environment(folder: Path, django: str, *more: str) -> Path:
    """Create a virtual environment with a Django version and further distributions; return its interpreter."""
    python = run_tests.find_python(run_tests.NEW)
    if python is None:
        raise servers.NotAvailable("no interpreter for Python 3.12 or later was found on PATH or in pyenv")
    names = [*TESTING, *more, *(("django-tasks",) if django.startswith("5.") else ())]
    constraints = folder.with_suffix(".txt")
    pinned = pins() | {"Django": django}
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in pinned.items()))
    interpreter = folder / "bin" / "python"
    for command in (
        [python, "-m", "venv", str(folder)],
        [str(interpreter), "-m", "pip", "install", "-q", "-c", str(constraints), "Django", *names],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return interpreter


@contextlib.contextmanager
def databases() -> Iterator[dict[str, str]]:
    """Start a private server of each engine; yield their URLs, and an empty one for SQLite."""
    with contextlib.ExitStack() as stack:
        urls = {"sqlite": ""}
        for engine in servers.ENGINES:
            servers.install(engine)
            # As Django recommends; MariaDB 10.11 would create tables in latin1.
            server = servers.running(engine, extra=("--character-set-server=utf8mb4",))
            urls[engine] = stack.enter_context(server).url
        yield urls


def variables(folder: Path, number: int, url: str) -> dict[str, str]:
    """Return the environment variables of a run, which has a database of its own."""
    left_out = ("DATABASE_URL", "DJANGO_SETTINGS_MODULE")
    found = {name: value for name, value in os.environ.items() if name not in left_out} | {"PYTHONPATH": str(ROOT)}
    if url:
        found["DATABASE_URL"] = urlsplit(url)._replace(path=f"/conformance{number}").geturl()
    else:
        found["TEST_SQLITE_FILE"] = str(folder / f"run{number}.sqlite3")
    return found


# -- running the suite --------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run of the suite: backends with a Django version on an engine."""

    django: str
    engine: str
    backends: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"Django {self.django}, {TITLES[self.engine]}"


def runs() -> list[Run]:
    """Return all runs. ImmediateBackend has no database."""
    *_, newest = djangos()
    found = [
        Run(django, engine, (OURS, IMMEDIATE) if engine == "sqlite" else (OURS,))
        for django in djangos()
        for engine in ENGINES
    ]
    return found + [Run(newest, engine, (rival,)) for rival in RIVALS for engine in ENGINES]


def run_suite(only: str | None) -> None:
    """Run the suite for everything, or for one backend, and store the results."""
    chosen = [run for run in runs() if only in (None, *run.backends)]
    tested = {name for run in chosen for name in run.backends}
    outcomes: dict[str, dict[str, list[str]]] = {name: {} for name in tested}
    ran: dict[str, list[str]] = {name: [] for name in tested}
    with tempfile.TemporaryDirectory(prefix="conformance-") as name, databases() as urls:
        folder = Path(name)
        newest = djangos()[-1]
        interpreters = {
            django: environment(folder / django, django, *(RIVALS if django == newest else ()))
            for django in {run.django for run in chosen}
        }
        for number, run in enumerate(chosen):
            found = _run(run, interpreters[run.django], folder, number, urls[run.engine])
            for backend in run.backends:
                ran[backend].append(run.title)
                mine = {test: ok for (of, test), ok in found.items() if of == backend}
                print(f"{backend}, {run.title}: {sum(mine.values())} of {len(mine)}", flush=True)
                for test, ok in mine.items():
                    outcomes[backend].setdefault(test, []).extend([] if ok else [run.title])
    versions = {OURS: _own_version(), IMMEDIATE: newest, **{name: pins()[name] for name in RIVALS}}
    stored = json.loads(RESULTS.read_text())
    stored["versions"] |= {name: versions[name] for name in tested}
    stored["runs"] |= ran
    stored["outcomes"] |= {name: dict(sorted(of.items())) for name, of in outcomes.items()}
    store(stored)


def _run(run: Run, interpreter: Path, folder: Path, number: int, url: str) -> dict[tuple[str, str], bool]:
    """Return whether each test of each backend has passed in all of its variants."""
    env = variables(folder, number, url) | {"TEST_TASK_BACKENDS": " ".join(run.backends)}
    options = []
    if OURS not in run.backends:
        # A rival may warn of what it likes.
        env["TEST_APPS"] = RIVALS[run.backends[0]]
        options = ["-o", "filterwarnings=default"]
    report = folder / f"run{number}.xml"
    command = [str(interpreter), "-m", "pytest", "-p", "no:cacheprovider", "-q", *options, f"--junitxml={report}"]
    with (folder / f"run{number}.log").open("w+") as log:
        done = subprocess.run([*command, str(SUITE)], cwd=ROOT, env=env, stdout=log, stderr=log, check=False)
        if done.returncode not in (0, 1):
            log.seek(0)
            raise SystemExit(f"{run.title}: pytest could not run the suite:\n{log.read()[-5000:]}")
    return _outcomes(report, run.backends)


def _outcomes(report: Path, backends: Sequence[str]) -> dict[tuple[str, str], bool]:
    found: dict[tuple[str, str], bool] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  # pytest wrote it
        test, _, variant = case.get("name", "").partition("[")
        if case.find("skipped") is not None:
            continue
        (backend,) = (name for name in backends if name in variant)
        key = backend, f"{case.get('classname', '').rpartition('.')[2]}::{test}"
        failed = case.find("failure") is not None or case.find("error") is not None
        found[key] = found.get(key, True) and not failed
    return found


def run_own_tests() -> None:
    """Run django-tasks-db's tests with this package's backend, and store the results."""
    version, django = pins()[TASKS_DB], djangos()[-1]
    with tempfile.TemporaryDirectory(prefix="tasks-db-") as name, databases() as urls:
        folder = Path(name)
        # Without the package, whose name the tests would import.
        interpreter = environment(folder / "venv", django)
        project = tasks_db_tests.prepare(interpreter, folder, version)
        found = [
            tasks_db_tests.run(interpreter, project, TITLES[engine], variables(folder, number, urls[engine]))
            for number, engine in enumerate(ENGINES)
        ]
    store(json.loads(RESULTS.read_text()) | {"own_tests": tasks_db_tests.merged(found, version, django)})


def _own_version() -> str:
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return str(version)


def store(results: Mapping[str, Any]) -> None:
    """Store the results, and write the page."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(written())


# -- the page -----------------------------------------------------------------


@dataclass(frozen=True)
class Sentence:
    """A test, and the sentence that it is about."""

    topic: str
    test: str
    source: str
    text: str


def sentences() -> list[Sentence]:
    """Return the sentences of all tests, by topic."""
    found = []
    for file in sorted(SUITE.glob("test_*.py")):
        tree = ast.parse(file.read_text())
        topic = ast.get_docstring(tree) or file.stem
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                (cited,) = (
                    mark
                    for mark in node.decorator_list
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "sentence"
                )
                source, text = (ast.literal_eval(argument) for argument in cited.args)
                found.append(Sentence(topic, f"{file.stem}::{node.name}", source, text))
    return found


INTRODUCTION = """# Task backends compared

<!-- Written by tools/conformance.py: run it again instead of editing the page. -->

This page counts which promises of Django's documentation the backends for `django.tasks` keep. Each test in
`tests/tasks_conformance` of the source repository cites one sentence of Django's [guide to
tasks](https://docs.djangoproject.com/en/6.1/topics/tasks/), of the
[reference](https://docs.djangoproject.com/en/6.1/ref/tasks/) or of Django's source code, and was written from that
sentence. A backend passes if the test succeeds with every version of Django and every database in this table.

| Backend | Version | Tested with |
|---|---|---|
"""


def written() -> str:
    """Return the page's text.

    Raises:
        SystemExit: The results are of other tests than the suite has.
    """
    results = json.loads(RESULTS.read_text())
    cited = sentences()
    outcomes = results["outcomes"]
    known = {test for of in outcomes.values() for test in of}
    if stale := known ^ {one.test for one in cited}:
        raise SystemExit(f"Run tools/conformance.py run: the results do not fit the tests {', '.join(sorted(stale))}")
    parts = [INTRODUCTION]
    parts += [
        f"| {name} | {results['versions'][name]} | {_environments(results['runs'][name])} |\n" for name in BACKENDS
    ]
    parts.append("\n## Results by topic\n\nTests that a backend passes, of those that apply to it.\n\n")
    parts.append(f"| Topic | Tests | {' | '.join(BACKENDS)} |\n|---|---|{'---|' * len(BACKENDS)}\n")
    topics = list(dict.fromkeys(one.topic for one in cited))
    for topic in [*topics, None]:
        mine = [one.test for one in cited if topic in (one.topic, None)]
        counts = " | ".join(_count(outcomes[name], mine) for name in BACKENDS)
        parts.append(f"| {topic or '**All**'} | {len(mine)} | {counts} |\n")
    parts.append(NOT_APPLICABLE)
    parts.append("\n## Sentences that fail\n")
    for name in BACKENDS:
        failed = [one for one in cited if outcomes[name].get(one.test)]
        parts.append(f"\n### {name}\n\n" + ("".join(map(_line(results, name), failed)) or "None.\n"))
    parts += [TIMEDELTA, UNTESTED]
    parts.append(tasks_db_tests.section(results["own_tests"]))
    return "".join(parts)


NOT_APPLICABLE = """
Tests of a feature apply only to backends that have it: `ImmediateBackend` has no `run_after`, no `get_result()` and no
worker; neither it nor django-tasks-db nor dj-queue retries tasks; and dj-queue's worker does not end when nothing is
due, as the tests of a worker's process need. Several tests may cite the same sentence.
"""
TIMEDELTA = """
`BaseTaskBackend.validate_task()` of Django raises an exception for a `timedelta`. So only a backend that handles it by
itself passes that test.
"""
UNTESTED = """
## Sentences without a test

- "If the task is currently running, it does not count as an attempt" (`TaskResult.attempts`) contradicts Django's own
  classes: both `attempts` and `TaskContext.attempt`, which starts at 1, are the number of `worker_ids`.
- Sentences about the setting `TASKS` itself, `DummyBackend`, and arguments of `@task` for a `task_class` of a backend
  promise nothing of other backends.
"""


def _environments(titles: Sequence[str]) -> str:
    """Return runs as text: the engines of each Django version."""
    engines: dict[str, list[str]] = {}
    for title in titles:
        django, engine = title.split(", ")
        engines.setdefault(django, []).append(engine)
    return "; ".join(f"{django} on {', '.join(names)}" for django, names in engines.items())


def _count(outcomes: Mapping[str, list[str]], tests: Sequence[str]) -> str:
    mine = [outcomes[test] for test in tests if test in outcomes]
    return f"{sum(not failed for failed in mine)} of {len(mine)}"


def _line(results: Mapping[str, Any], name: str) -> Any:
    def line(one: Sentence) -> str:
        failed = results["outcomes"][name][one.test]
        where = "" if len(failed) == len(results["runs"][name]) else f" With {_environments(failed)}."
        return f'- {one.source}: "{one.text}" (`{one.test.partition("::")[2]}`){where}\n'

    return line


def main() -> int:
    servers.end_servers_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["run", "own-tests", "page"])
    parser.add_argument("--only", choices=BACKENDS, help="for run: the only backend")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the page is out of date")
    options = parser.parse_args()
    if options.step == "page" and options.check:
        return int(not PAGE.exists() or PAGE.read_text() != written())
    if options.step == "run":
        run_suite(options.only)
    elif options.step == "own-tests":
        run_own_tests()
    else:
        PAGE.write_text(written())
    return 0


if __name__ == "__main__":
    sys.exit(main())
