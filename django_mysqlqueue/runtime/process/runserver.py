"""A subscriber beside ``runserver``, with ``MYSQLQUEUE["RUN_IN_SERVER"]``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from django.conf import settings
from django.utils.autoreload import DJANGO_AUTORELOAD_ENV, get_child_arguments

from django_mysqlqueue.options import conf
from django_mysqlqueue.runtime.process import keeper


def start_subscriber() -> None:
    """Start a subscriber beside ``runserver``, whose arguments this process has, if the setting is on.

    When the code changes, Django's reloader ends this process and starts another one. The subscriber ends with it.
    """
    if "--noreload" not in sys.argv and not os.environ.get(DJANGO_AUTORELOAD_ENV):
        return  # It is the reloader, which starts the server in a process of its own.
    if conf.problems() or not conf.get_settings().run_in_server:  # The server reports the problems.
        return
    if not settings.DEBUG:
        keeper.say("MYSQLQUEUE['RUN_IN_SERVER'] is ignored, because DEBUG is False: run manage.py runsubscriber.")
        return
    keeper.say("Starting a subscriber beside the server (MYSQLQUEUE['RUN_IN_SERVER']).")
    arguments = get_child_arguments()
    before = arguments[: arguments.index("runserver")]
    keeper.start([*before, "runsubscriber", *keeper.DEFAULT, *_python_path(arguments)])


def _python_path(arguments: Sequence[str]) -> list[str]:
    """Return the option ``--pythonpath`` if it is given: unlike ``--settings``, the environment does not pass it on."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--pythonpath")
    path = parser.parse_known_args(arguments)[0].pythonpath
    return [f"--pythonpath={path}"] if path else []
