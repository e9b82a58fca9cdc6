#!/usr/bin/env python3
"""Run the soak test, for ``make soak``. Standard library only.

It prepares the environment as ``make test`` does, then runs ``python -m soak`` with the same arguments.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import run_tests  # beside this file
import servers


def main() -> int:
    try:
        servers.apt_install(servers.DRIVER_PACKAGES)
        interpreter = run_tests.prepare(run_tests.NEW)
    except servers.NotAvailable as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        return 1
    env = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "DJANGO_SETTINGS_MODULE")}
    env["PYTHONPATH"] = os.pathsep.join([str(run_tests.ROOT / "tools"), str(run_tests.ROOT)])
    process = subprocess.Popen([str(interpreter), "-m", "soak", *sys.argv[1:]], cwd=run_tests.ROOT, env=env)
    servers.end_servers_on_sigterm()
    try:
        return process.wait()
    except KeyboardInterrupt:  # the soak test received it too, and stops its processes
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
