"""The tables. Migrations make them (`migrations/versions`); this is what the queries are written against.

Only types and constructs that SQLite and PostgreSQL share. Times are seconds since the epoch.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

metadata = sa.MetaData()


class Words(TypeDecorator[str]):
    """Text from clients. JSON may carry lone surrogates, which no UTF-8 column takes: they become U+FFFD."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or value.isascii():
            return value
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


interactions = sa.Table(
    "interactions",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("id", Words, nullable=False),
    sa.Column("index", sa.Integer, nullable=False),
    sa.Column("policy", Words, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("version_end", sa.Integer, nullable=False),
    sa.Column("arm", Words, nullable=False),
    sa.Column("project", Words, nullable=False),
    sa.Column("user", Words, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("finished_at", sa.Double, nullable=False),
    sa.Column("prompt_hash", sa.String(32), nullable=False),
    sa.Column("suffix_hash", sa.String(32), nullable=False),
    sa.Column("temperature", sa.Double, nullable=False),
    sa.Column("top_p", sa.Double, nullable=False),
    sa.Column("finish", sa.String(16), nullable=False),
    sa.Column("language", Words, nullable=False),
    sa.Column("multiline", sa.Boolean, nullable=False),
    sa.Column("label", Words, nullable=False),
    sa.Column("untrainable", Words, nullable=False),
    sa.Column("displayed", sa.Integer),
    sa.Column("verdict", sa.String(16)),
    sa.Column("verdict_source", Words, nullable=False),
    sa.Column("verdict_at", sa.Double),
    sa.Column("score", sa.Double),
    sa.Column("retained_characters", sa.Integer),
    sa.Column("shown_at", sa.Double),
    # shown, silent or nothing: what the answer is, whatever was said of it
    sa.Column("kind", sa.String(8), nullable=False),
    # open → labelled → claimed; labelled → held | dropped; claimed → dropped
    sa.Column("use", sa.String(8), nullable=False),
    sa.Column("dropped", sa.String(16), nullable=False),  # why it was dropped, in a short word
    sa.Column("used_at", sa.Double),  # when `use` was last changed by a run
    sa.Column("run", sa.Integer),
    sa.Column("batch", sa.Integer),
    # long ones last: SQLite reads a row from the left
    sa.Column("prompt", Words, nullable=False),
    sa.Column("prompt_ids", sa.LargeBinary, nullable=False),  # int32, little-endian
    sa.Column("completion", Words, nullable=False),
    sa.Column("completion_ids", sa.LargeBinary, nullable=False),  # int32, little-endian
    sa.Column("behavior_logprobs", sa.LargeBinary, nullable=False),  # float32, little-endian
    sa.Column("offsets", sa.LargeBinary, nullable=False),  # int32, little-endian
    # Behind the long ones, since SQLite adds a column at the end, at once; elsewhere it would copy the table.
    sa.Column("propensity", sa.Double, nullable=False, server_default=sa.text("1.0")),
    sa.Column("reward", sa.Double),  # what it was trained with, and of what that is made up (JSON);
    sa.Column("reward_parts", sa.Text),  # null: no surviving version was
    sa.Column("experiment", sa.Integer),  # null: it counts in none
    sa.Column("unit", Words, nullable=False, server_default=sa.text("''")),
    sa.Column("characters", sa.Integer),  # of the completion, where it counts in an experiment
    sa.UniqueConstraint("id", "index", name="interactions_id"),
)
# One each for: claim and waiting, candidates by text, drift's windows, the label rate, release, drops.
sa.Index(
    "interactions_use", interactions.c.policy, interactions.c.use, interactions.c.seq, interactions.c.verdict
)
sa.Index("interactions_prompt", interactions.c.project, interactions.c.prompt_hash, interactions.c.at)
sa.Index("interactions_suffix", interactions.c.project, interactions.c.suffix_hash, interactions.c.at)
sa.Index("interactions_recent", interactions.c.project, interactions.c.at)
sa.Index(
    "interactions_verdict",
    interactions.c.policy,
    interactions.c.kind,
    interactions.c.verdict_at,
    interactions.c.verdict,
)
sa.Index(  # and for charts, which count what it holds and read no row
    "interactions_kind",
    *(interactions.c[name] for name in ("policy", "kind", "at", "verdict", "version", "verdict_source")),
)
sa.Index("interactions_run", interactions.c.run, interactions.c.batch)
EXPERIMENTAL = interactions.c.experiment.is_not(None)
# All that an experiment counts by unit: a look at it reads this index alone, in its order, and no prompt.
sa.Index(
    "interactions_experiment",
    *(
        interactions.c[name]
        for name in (
            "experiment", "unit", "arm", "at", "finished_at", "kind", "verdict", "verdict_source", "finish",
            "score", "retained_characters", "characters",
        )
    ),
    sqlite_where=EXPERIMENTAL,
    postgresql_where=EXPERIMENTAL,
)  # fmt: skip
DROPPED = interactions.c.use == sa.literal("dropped", literal_execute=True)
"""As text in the statement: a database takes a partial index only where it sees the condition itself."""
sa.Index(
    "interactions_dropped",
    interactions.c.policy,
    interactions.c.run,
    interactions.c.dropped,
    interactions.c.use,  # SQLite asks the row for it otherwise, though the condition says it
    sqlite_where=DROPPED,
    postgresql_where=DROPPED,
)

tallies = sa.Table(
    "tallies",
    metadata,
    sa.Column("policy", Words, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("opportunities", sa.Integer, nullable=False),
    sa.Column("shown", sa.Integer, nullable=False),
    sa.Column("silent", sa.Integer, nullable=False),
    sa.Column("accepted", sa.Integer, nullable=False),
    sa.Column("rejected", sa.Integer, nullable=False),
    sa.Column("timeout", sa.Integer, nullable=False),
)
"""Running counts, kept in the transactions that change them, so that nobody counts a million rows."""

feedback = sa.Table(
    "feedback",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("source", Words, nullable=False),
    sa.Column("event", sa.String(16), nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("project", Words, nullable=False),
    sa.Column("user", Words, nullable=False),
    sa.Column("id", Words),  # the interaction's id: as joined, else as named by the client
    sa.Column("index", sa.Integer, nullable=False),
    sa.Column("interaction", sa.Integer, sa.ForeignKey("interactions.seq", name="feedback_interaction")),
    sa.Column("deadline", sa.Double, nullable=False),  # seconds after the request
    sa.Column("displayed_text", Words),
    sa.Column("accepted_text", Words),
    sa.Column("retained_characters", sa.Integer),
    sa.Column("score", sa.Double),
    sa.Column("client_id", Words),
    sa.Column("cached", sa.Boolean, nullable=False),
    sa.Column("payload", sa.Text, nullable=False),  # JSON, ASCII
)
sa.Index("feedback_id", feedback.c.id, feedback.c.index)
sa.Index("feedback_of", feedback.c.interaction)
sa.Index("feedback_client", feedback.c.project, feedback.c.client_id)
sa.Index("feedback_recent", feedback.c.at, feedback.c.status)

policies = sa.Table(
    "policies",
    metadata,
    sa.Column("policy", Words, primary_key=True),
    sa.Column("next_version", sa.Integer, nullable=False),
)
"""The next version id of each policy: an id is given out once, also to a writer that dies."""

versions = sa.Table(
    "versions",
    metadata,
    sa.Column("policy", Words, primary_key=True),
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("parent", sa.Integer),
    sa.Column("run", sa.Integer),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("url", Words, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("metrics", sa.Text, nullable=False),  # JSON
    sa.Column("live_at", sa.Double),
    sa.Column("replaced", sa.Integer),  # what was live when it was promoted: where rollback goes
    sa.Column("collected_at", sa.Double),  # when gc took its files
)
sa.Index(
    "versions_one_live",
    versions.c.policy,
    unique=True,
    sqlite_where=versions.c.state == "live",
    postgresql_where=versions.c.state == "live",
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("policy", Words, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("parent", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("heartbeat_at", sa.Double, nullable=False),
    sa.Column("host", Words, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("pid_started", Words, nullable=False),  # tells a process from a later one with its pid
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("tau", sa.Double, nullable=False),
    sa.Column("wish", sa.String(8), nullable=False),
    sa.Column("message", Words, nullable=False),
    sa.Column("settings", Words, nullable=False),  # JSON
    sa.Column("follow", sa.Boolean, nullable=False),
    sa.Column("last_batch", sa.Integer),
    sqlite_autoincrement=True,  # an id is never given twice: samples point to it
)
_unfinished = runs.c.state.in_(("pending", "running", "paused"))
sa.Index(
    "runs_one_active", runs.c.policy, unique=True, sqlite_where=_unfinished, postgresql_where=_unfinished
)

steps = sa.Table(
    "steps",
    metadata,
    sa.Column("run", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("batch", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("numbers", sa.Text, nullable=False),  # JSON: name → number; docs/metrics.md explains the names
)
"""What each batch of a run measured. A run that is resumed repeats batches: the last time counts."""

experiments = sa.Table(
    "experiments",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("policy", Words, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("control", sa.Text, nullable=False),  # JSON of records.Arm
    sa.Column("treatment", sa.Text, nullable=False),  # JSON of records.Arm
    sa.Column("plan", sa.Text, nullable=False),  # JSON of config.Experiments
    sa.Column("salt", Words, nullable=False),
    sa.Column("tau", sa.Double, nullable=False),
    sa.Column("alpha", sa.Double, nullable=False),
    sa.Column("stage", sa.Integer, nullable=False),
    sa.Column("stage_at", sa.Double, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double),
    sa.Column("actor", Words, nullable=False),
    sa.Column("message", Words, nullable=False),
    sa.Column("rewards", sa.Text, nullable=False),  # JSON of config.Rewards
    sqlite_autoincrement=True,  # an id is never given twice: interactions point to it
)
_open = experiments.c.state.in_(("running", "waiting"))
sa.Index(
    "experiments_one_open", experiments.c.policy, unique=True, sqlite_where=_open, postgresql_where=_open
)

decisions = sa.Table(
    "decisions",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("experiment", sa.Integer, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("stage", sa.Integer, nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("actor", Words, nullable=False),
    sa.Column("proposed", sa.Boolean, nullable=False),
    sa.Column("reason", Words, nullable=False),
    sa.Column("numbers", sa.Text, nullable=False),  # JSON: name → number
)
sa.Index("decisions_of", decisions.c.experiment, decisions.c.seq)

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("actor", Words, nullable=False),
    sa.Column("policy", Words, nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("from_state", sa.String(16), nullable=False),  # "" when it was registered
    sa.Column("to_state", sa.String(16), nullable=False),
    sa.Column("reason", Words, nullable=False),
)
sa.Index("audit_of", audit.c.policy, audit.c.version)
