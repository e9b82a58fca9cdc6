"""Procedures that stop after a statement: there, the server ends their connection, as after a crash of the client, or
the statement alone (KILL QUERY), as after a time limit of the client's driver.

The procedures of the package have a call of ``queue__probe`` after each statement that reads or writes rows, or begins
or ends a transaction.
"""

from __future__ import annotations

import re

from django.db import connections

from tests.support.harness import USING
from tests.support.internals import COMMENT, installing

_STATEMENT = re.compile(
    r"^[ \t]*(?:INSERT INTO|UPDATE|DELETE FROM|COMMIT|START TRANSACTION|SELECT\b[^;]*?\bINTO)\b[^;]*;", re.MULTILINE
)
PROBE = f"""CREATE PROCEDURE queue__probe() COMMENT '{COMMENT} probe'
BEGIN
  SET @queue_step = COALESCE(@queue_step, 0) + 1;
  IF @queue_step = @queue_kill THEN
    IF @queue_query THEN
      KILL QUERY CONNECTION_ID();
    ELSE
      KILL CONNECTION_ID();
    END IF;
  END IF;
END"""


def install() -> None:
    """Replaces the procedures."""
    installing.remove(USING)
    with connections[USING].cursor() as cursor:
        cursor.execute(PROBE)
        for one in installing.wanted(USING):
            cursor.execute(_STATEMENT.sub(r"\g<0> CALL queue__probe();", one.sql))
