"""What the log, recorded deliveries and rollups say, as DataFrame functions.

Each takes DataFrames with the columns of ``layout.COLUMNS`` (the log),
``tables.EVENTS_DDL``, ``tables.ROLLUPS_DDL`` or ``tables.GROUPS_DDL`` and returns
one; none runs anything by itself. Days and hours are those of the session's time
zone, which ``session()`` sets to UTC.
"""
