"""What tests need of the inside of the package: a module that moves changes this file alone.

Tests of one module may import it themselves.
"""

from __future__ import annotations

from django_mysqlqueue.arguments import checked, spelled_out
from django_mysqlqueue.db.sizes import (
    LATENCY_BOUNDS_MS,
    LATENCY_COLUMNS,
    LATEST_DELIVERY,
    MAX_METADATA_BYTES,
    PROGRESS_LENGTH,
)
from django_mysqlqueue.names.ids import RUN_PREFIX, run_id, schedule_of, tick_of
from django_mysqlqueue.names.keys import (
    LANE_KEY_LENGTH,
    LOWEST_PRIORITY,
    Lane,
    check_priority,
    lane,
    lane_of,
    priority_of,
    public_coalesce_key,
    scoped_coalesce_key,
)
from django_mysqlqueue.names.rules import JOB_GROUP, JOB_PREFIX, KEY_LENGTH, relay_target, relayed_from, relayed_topic
from django_mysqlqueue.operations import (
    celery_beat,
    dead_lettering,
    recurring,
    redriving,
    retrying,
    scheduled,
    seeking,
    steps,
)
from django_mysqlqueue.options.allowed_users import is_allowed, parse_allowed_users
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.conf import BellSettings, HealthSettings, Settings, get_settings, problems
from django_mysqlqueue.options.table import IN_CODE, OPTIONS, OVERRIDABLE, as_text, parse_text, storable
from django_mysqlqueue.options.topic_settings import TopicSettings
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.procedures import CLIENT_PROCEDURES, definitions, installing
from django_mysqlqueue.procedures.definitions import COMMENT, procedures
from django_mysqlqueue.runtime import inline, registering, sessions, stopping
from django_mysqlqueue.runtime.handling import (
    call,
    executor,
    inbox,
    lanes,
    observers,
    stacks,
    starts,
    unstarted,
)
from django_mysqlqueue.runtime.handling.event_loop import Loop
from django_mysqlqueue.runtime.handling.executor import Executor
from django_mysqlqueue.runtime.handling.inbox import FLUSH_DELAY, SLICE, WRITTEN_DELAY, Inbox
from django_mysqlqueue.runtime.handling.lanes import Batch, Held
from django_mysqlqueue.runtime.handling.observers import Settled
from django_mysqlqueue.runtime.handling.settled_signal import Teller
from django_mysqlqueue.runtime.handling.starts import Starts
from django_mysqlqueue.runtime.handling.unstarted import Unstarted
from django_mysqlqueue.runtime.inline import InlineSubscriber, deliver_eagerly
from django_mysqlqueue.runtime.polling import (
    blocked,
    configured,
    context,
    health,
    limited,
    maintenance,
    ordered,
    poller,
    relays,
    ticking,
    writing,
)
from django_mysqlqueue.runtime.polling.context import LIMITS, Context, PollingLimits, Progress
from django_mysqlqueue.runtime.polling.entered import Entered
from django_mysqlqueue.runtime.polling.group import Group
from django_mysqlqueue.runtime.polling.limited import LONGEST_REST_MS, Limited
from django_mysqlqueue.runtime.polling.ordered import TAKE_OVER, OrderedMode
from django_mysqlqueue.runtime.polling.poller import OWN_POLL, Poller
from django_mysqlqueue.runtime.polling.relays import PassSize, Relay, Relays
from django_mysqlqueue.runtime.polling.shared import SharedMode
from django_mysqlqueue.runtime.polling.ticking import Ticker
from django_mysqlqueue.runtime.priorities import ByPriority, Turns
from django_mysqlqueue.runtime.process import lifeline, memory, subscriber, worker
from django_mysqlqueue.runtime.process.heartbeat import Heart
from django_mysqlqueue.runtime.process.lifeline import Incarnation, Lifeline
from django_mysqlqueue.runtime.process.liveness_file import HeartbeatFile
from django_mysqlqueue.runtime.process.subscriber import Subscriber
from django_mysqlqueue.runtime.process.supervisor import RESTARTS, Margins, Supervisor
from django_mysqlqueue.runtime.registering import declared_schedules, register, register_groups, register_schedules
from django_mysqlqueue.runtime.threads import about, worker_thread
from django_mysqlqueue.runtime.timers import SPARE, Timers
from django_mysqlqueue.runtime.transactions import AfterCommit
from django_mysqlqueue.service import (
    audit,
    bell,
    claiming,
    clocks,
    coalescing,
    databases,
    dead_letters,
    debouncing,
    delivery_events,
    groups,
    heartbeats,
    job_messages,
    job_progress,
    job_results,
    job_retries,
    job_rows,
    job_stages,
    known_topics,
    leasing,
    log,
    log_places,
    messages,
    new_messages,
    open_transactions,
    partitions,
    payloads,
    polling,
    pruning,
    publish_hooks,
    publishing,
    quarantine,
    readers,
    redelivering,
    relaying,
    releasing,
    remote_bell,
    retention,
    rollups,
    routing,
    samples,
    schedules,
    scheduling,
    sequencing,
    settling,
    slots,
    superseding,
    unclaimed,
    wakeups,
    watermarks,
)
from django_mysqlqueue.service.claims import Budget, Claim, Claimant, ClaimRequest, Due, Later, Left, Seen, Want
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.databases import queue_alias, queue_aliases, works_on
from django_mysqlqueue.service.dead_letters import DeadLetterFilter, matching_offsets
from django_mysqlqueue.service.deliveries import (
    Action,
    Claimed,
    Flushed,
    Holding,
    JobEnd,
    JobEnds,
    JobRetry,
    Returned,
    Settlement,
    Slot,
)
from django_mysqlqueue.service.groups import OptionColumns, Registered
from django_mysqlqueue.service.heartbeats import RoundTrip
from django_mysqlqueue.service.job_rows import NewResult
from django_mysqlqueue.service.leasing import MAX_PENDING, Acquired
from django_mysqlqueue.service.log_places import LogPlace
from django_mysqlqueue.service.messages import (
    EPOCH,
    ERROR_LENGTH,
    Message,
    decode,
    decode_metadata,
    duration_ms,
    encode,
    publisher_key,
)
from django_mysqlqueue.service.open_transactions import Holder
from django_mysqlqueue.service.payloads import Body
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.relaying import NotInserted, Refusal, Relayed, Watermark, note_refusal, relay, watermark
from django_mysqlqueue.service.releasing import Released
from django_mysqlqueue.service.retention import Checkpoint
from django_mysqlqueue.service.rollups import Bucket
from django_mysqlqueue.service.routing import Route, route_of, set_route
from django_mysqlqueue.service.schedules import Row
from django_mysqlqueue.service.sequencing import Mutex, Sequenced, identify, sequence
from django_mysqlqueue.service.slots import Reservation, Rest
from django_mysqlqueue.service.subsets import EVERYTHING, Subset
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql import connection, dialect_of, failures, mysql, packets, session, several, sqlite, statements
from django_mysqlqueue.sql.connection import (
    apart,
    bounded,
    close_connections,
    database_name,
    drop_connection,
    end_ahead,
    has_unread,
    is_server,
    limited_settings,
)
from django_mysqlqueue.sql.mysql import DIALECT, INNODB_TRANSACTIONS, LOCK_WAIT_TIMEOUT, STATEMENT_ERRORS
from django_mysqlqueue.sql.packets import packets_of, together, use_packets
from django_mysqlqueue.sql.session import Retry, Session, flat, run
from django_mysqlqueue.sql.several import Unread, read_each, start_each
from django_mysqlqueue.subscriptions import registry
from django_mysqlqueue.subscriptions.delivery import Delivery
from django_mysqlqueue.subscriptions.effective import effective_options
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.subscriptions.options import Override, check_override, overridden, registrable, stored
from django_mysqlqueue.subscriptions.registry import handlers
from django_mysqlqueue.subscriptions.unknown_tasks import LONGEST_ERROR, UnknownTasks
from django_mysqlqueue.text.error_texts import error_class, error_name, masked
from django_mysqlqueue.text.escaping import HIDDEN, visible, visible_lines
from django_mysqlqueue.text.humanize import close_names, counted, did_you_mean, duration, listed, partition_text, up_to
from django_mysqlqueue.version import __version__

NO_WAIT = Backoff(initial=0)
"""The backoff of a claimant that takes lost messages at once."""
