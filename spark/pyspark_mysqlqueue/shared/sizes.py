# Generated from django_mysqlqueue/db/sizes.py by tools/shared_modules.py.
"""What columns hold at most. Nothing here depends on Django, since Spark executors do not have it."""

from __future__ import annotations

from typing import Any

from pyspark_mysqlqueue.errors import InvalidMessage

REFUSAL_LENGTH = 500
"""Maximum length of the error of a database that refuses a relayed message, in characters."""
JOB_PATH_LENGTH = 181
"""Maximum length of the dotted path of a task: it is the key of its jobs, which may have a priority."""
PROGRESS_LENGTH = 1500
"""Maximum length of the progress of a job as JSON."""
PROGRESS_MESSAGE_LENGTH = 200
"""Maximum length of the message in it: as JSON, each character takes six at most."""
RETRY_REASON_LENGTH = 200
"""Maximum length of the reason that a job has given for its next attempt."""
MOST_STAGES = 1000
"""Maximum number of stages of a chain of jobs, which one transaction ends if a job fails."""
MOST_STAGE_JOBS = 10_000
"""Maximum number of jobs of a stage, which one transaction publishes."""
MAX_METADATA_BYTES = 65_535
MAX_METADATA_DEPTH = 30
"""Maximum nesting. MariaDB's JSON_VALID accepts up to 32 levels, MySQL's up to 100."""
MAX_PAYLOAD_BYTES = 1_048_576
"""Default of the setting ``MAX_PAYLOAD_BYTES``."""
LATEST_DELIVERY = 253_402_300_799_000
"""Latest time of a delivery: the end of the year 9999, in epoch milliseconds."""
LATENCY_BOUNDS_MS = (
    *(5, 10, 25, 50, 100, 250, 500),
    *(1000, 2500, 5000, 10_000, 30_000),
    *(60_000, 120_000, 300_000, 600_000, 1_800_000),
    *(3_600_000, 7_200_000, 21_600_000, 43_200_000, 86_400_000),
)
"""Upper bounds of latencies in milliseconds."""
LATENCY_COLUMNS = (*(f"latency_{bound}ms" for bound in LATENCY_BOUNDS_MS), "latency_over")
"""The columns of the rollups that count latencies: up to each bound, and above the last one."""


def check_json_column(value: Any, depth: int = 1) -> None:
    """Require that JSON columns of all servers accept a value and do not round its numbers.

    Raises:
        InvalidMessage: the value is nested too deeply, or an integer does not fit in 64 bits.
    """
    if depth > MAX_METADATA_DEPTH:
        raise InvalidMessage(
            f"metadata: nested more than {MAX_METADATA_DEPTH} levels deep, which MariaDB does not accept"
        )
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            check_json_column(item, depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidMessage(
            f"metadata: the number {str(value)[:20]}… does not fit in 64 bits, and MySQL would round it"
        )
