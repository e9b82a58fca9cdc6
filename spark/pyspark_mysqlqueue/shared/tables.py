# Generated from django_mysqlqueue/db/tables.py by tools/shared_modules.py.
"""The names of the tables. Nothing here depends on Django, because Spark's executors do not have it."""

LOG = "queue_messages"
OUTBOX = "queue_outbox"
QUARANTINE = "queue_quarantine"
DEBOUNCED = "queue_debounced"
COALESCE_KEYS = "queue_coalesce_keys"
COLLECTED = "queue_collected"
SEQUENCER = "queue_sequencer"
SEQUENCER_ID = 1
"""The id of the sequencer's only row."""
MARKS = "queue_log_marks"
RELAY_POSITIONS = "queue_relay_positions"
RELAY_WATERMARKS = "queue_relay_watermarks"

GROUPS = "queue_consumer_groups"
HEARTBEATS = "queue_subscriber_heartbeats"
LEASES = "queue_partition_leases"
OFFSETS = "queue_offsets"
SLOTS = "queue_slots"
STATE = "queue_delivery_state"

READERS = "queue_readers"
ARCHIVE = "archive"
"""The name of the archive among the readers."""
RESULTS = "queue_job_results"
SCHEDULES = "queue_schedules"
STAGES = "queue_job_stages"

EVENTS = "queue_delivery_events"
OPERATIONS = "queue_operations"
ROLLUPS = "queue_rollups"
