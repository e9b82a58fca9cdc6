"""Changes of the project's code, found by Django's own reloader.

Django's ``run_with_reloader`` is not used because it kills running handlers; docs/design/by-hand.md compares the two.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from django.apps import apps
from django.utils import autoreload

from django_mysqlqueue.runtime.log import event

Snapshot = Mapping[Path, float]
"""When each watched file was last written."""
_LIBRARIES = {"site-packages", "dist-packages"}


def watch(on_change: Callable[[], None]) -> None:
    """Call ``on_change`` once, from a thread of its own, when a file of the running code changes."""
    threading.Thread(target=_watch, args=(on_change,), name="mysqlqueue-reloader", daemon=True).start()


def _watch(on_change: Callable[[], None]) -> None:
    try:
        autoreload.get_reloader().run(threading.main_thread())
    except SystemExit:
        # Django's reloader exits when a file has changed; its logger has named the file.
        on_change()
    except Exception:  # noqa: BLE001
        event(logging.ERROR, "reloader.failed", exc_info=True)


def snapshot() -> Snapshot:
    """Return the current state of the project's code without importing it.

    The supervisor needs it when a child could not import the code. It covers the modules that this process has
    imported, and every Python file in the folders of installed apps that are not libraries.
    """
    reloader = autoreload.StatReloader()
    for config in apps.get_app_configs():
        if _LIBRARIES.isdisjoint(Path(config.path).parts):
            reloader.watch_dir(config.path, "**/*.py")
    return dict(reloader.snapshot_files())
