"""For programs with Django: where the project's queue is, for the pipeline's parts that know no settings."""

from __future__ import annotations

import json
import os
from pathlib import Path

from django.db import connections

from django_mysqlqueue.pipeline.databases import URL_VARIABLE, Place
from django_mysqlqueue.pipeline.errors import PipelineError

PASSED_ON = (
    "host",
    "port",
    "user",
    "passwd",
    "password",
    "db",
    "database",
    "unix_socket",
    "ssl",
    "ssl_mode",
    "read_default_file",
    "read_default_group",
)
"""Of the driver's arguments; the others are about how Django speaks on the connection."""


def place(using: str) -> Place:
    """The queue's database of this project, told to Spark's workers through the environment.

    Call it before the Spark session starts: its processes inherit the environment as it is then.

    Raises:
        PipelineError: a session is running that knows another database.
    """
    connection = connections[using]
    parameters = connection.get_connection_params()
    if connection.vendor == "sqlite":
        # Workers may stand in another folder.
        details = {"sqlite_file": str(Path(parameters["database"]).absolute())}
    else:
        details = {name: parameters[name] for name in PASSED_ON if name in parameters}
    text = json.dumps(details, sort_keys=True)
    if os.environ.get(URL_VARIABLE) != text:
        from pyspark import SparkContext

        if SparkContext._gateway is not None:
            raise PipelineError(
                f"a Spark session is running and its workers do not know the database {using!r}: stop it first, "
                f"or start it with {URL_VARIABLE} set"
            )
        os.environ[URL_VARIABLE] = text
    return Place()
