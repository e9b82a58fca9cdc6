#!/usr/bin/env python3
"""Explore interleavings of the queue's operations, for ``make explore``. Standard library only.

It prepares the environment as ``make test`` does, starts a private server for each process, and runs
``python -m tests.interleavings``, to which it passes all other arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import run_tests  # beside this file
import servers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=servers.ENGINES, default="mariadb", help="server (default: mariadb)")
    parser.add_argument("--bound", default="2", metavar="N", help="maximum preemptions per schedule (default: 2)")
    parser.add_argument(
        "--statistics", choices=("small", "large"), default="small",
        help="table statistics for the optimizer: of small or of large tables (default: small)",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="number of processes, each with its own server (default: 1)"
    )
    options, others = parser.parse_known_args()
    servers.end_servers_on_sigterm()
    try:
        servers.apt_install(servers.DRIVER_PACKAGES)
        servers.install(options.engine)
        interpreter = run_tests.prepare(run_tests.NEW)
    except servers.NotAvailable as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        return 1
    results = run_tests.WORK / "explore"
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        for number in range(1, options.jobs + 1):
            server = stack.enter_context(servers.running(options.engine, extra=run_tests.EXTRA[options.engine]))
            name = f"{options.engine}-{options.statistics}-{options.bound}-{number}-of-{options.jobs}.jsonl"
            command = [str(interpreter), "-m", "tests.interleavings", "--bound", options.bound]
            command += ["--statistics", options.statistics, "--part", f"{number}/{options.jobs}"]
            command += ["--results", str(results / name), *others]
            env = os.environ | {"DATABASE_URL": server.url, "DJANGO_SETTINGS_MODULE": "tests.settings"}
            processes.append(subprocess.Popen(command, cwd=run_tests.ROOT, env=env))
        try:
            return max(process.wait() for process in processes)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
                    process.wait()


if __name__ == "__main__":
    sys.exit(main())
