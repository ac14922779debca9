"""The tables of the ring: interactions, feedback, versions, runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("from_state", sa.String(length=16), nullable=False),
        sa.Column("to_state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("audit_of", "audit", ["policy", "version"], unique=False)
    op.create_table(
        "interactions",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("version_end", sa.Integer(), nullable=False),
        sa.Column("arm", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=False),
        sa.Column("prompt_hash", sa.String(length=32), nullable=False),
        sa.Column("suffix_hash", sa.String(length=32), nullable=False),
        sa.Column("temperature", sa.Double(), nullable=False),
        sa.Column("top_p", sa.Double(), nullable=False),
        sa.Column("finish", sa.String(length=16), nullable=False),
        sa.Column("language", sa.Text(), nullable=False),
        sa.Column("multiline", sa.Boolean(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("untrainable", sa.Text(), nullable=False),
        sa.Column("displayed", sa.Integer(), nullable=True),
        sa.Column("verdict", sa.String(length=16), nullable=True),
        sa.Column("verdict_source", sa.Text(), nullable=False),
        sa.Column("verdict_at", sa.Double(), nullable=True),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("retained_characters", sa.Integer(), nullable=True),
        sa.Column("shown_at", sa.Double(), nullable=True),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("use", sa.String(length=8), nullable=False),
        sa.Column("dropped", sa.String(length=16), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=True),
        sa.Column("run", sa.Integer(), nullable=True),
        sa.Column("batch", sa.Integer(), nullable=True),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False),
        sa.Column("completion", sa.Text(), nullable=False),
        sa.Column("completion_ids", sa.LargeBinary(), nullable=False),
        sa.Column("behavior_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("offsets", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
        sa.UniqueConstraint("id", "index", name="interactions_id"),
    )
    op.create_index("interactions_kind", "interactions", ["policy", "kind", "at", "verdict"], unique=False)
    op.create_index("interactions_prompt", "interactions", ["project", "prompt_hash", "at"], unique=False)
    op.create_index("interactions_recent", "interactions", ["project", "at"], unique=False)
    op.create_index("interactions_run", "interactions", ["run", "batch"], unique=False)
    op.create_index("interactions_suffix", "interactions", ["project", "suffix_hash", "at"], unique=False)
    op.create_index("interactions_use", "interactions", ["policy", "use", "seq", "verdict"], unique=False)
    op.create_index(
        "interactions_verdict", "interactions", ["policy", "kind", "verdict_at", "verdict"], unique=False
    )
    op.create_table(
        "policies",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("next_version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("policy"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("parent", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("pid_started", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("tau", sa.Double(), nullable=False),
        sa.Column("wish", sa.String(length=8), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.Column("follow", sa.Boolean(), nullable=False),
        sa.Column("last_batch", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "runs_one_active",
        "runs",
        ["policy"],
        unique=True,
        sqlite_where=sa.text("state IN ('pending', 'running', 'paused')"),
        postgresql_where=sa.text("state IN ('pending', 'running', 'paused')"),
    )
    op.create_table(
        "tallies",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("opportunities", sa.Integer(), nullable=False),
        sa.Column("shown", sa.Integer(), nullable=False),
        sa.Column("silent", sa.Integer(), nullable=False),
        sa.Column("accepted", sa.Integer(), nullable=False),
        sa.Column("rejected", sa.Integer(), nullable=False),
        sa.Column("timeout", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("policy", "version"),
    )
    op.create_table(
        "versions",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("run", sa.Integer(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("live_at", sa.Double(), nullable=True),
        sa.Column("replaced", sa.Integer(), nullable=True),
        sa.Column("collected_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("policy", "id"),
    )
    op.create_index(
        "versions_one_live",
        "versions",
        ["policy"],
        unique=True,
        sqlite_where=sa.text("state = 'live'"),
        postgresql_where=sa.text("state = 'live'"),
    )
    op.create_table(
        "feedback",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("event", sa.String(length=16), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=True),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("interaction", sa.Integer(), nullable=True),
        sa.Column("deadline", sa.Double(), nullable=False),
        sa.Column("displayed_text", sa.Text(), nullable=True),
        sa.Column("accepted_text", sa.Text(), nullable=True),
        sa.Column("retained_characters", sa.Integer(), nullable=True),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("client_id", sa.Text(), nullable=True),
        sa.Column("cached", sa.Boolean(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["interaction"], ["interactions.seq"], name="feedback_interaction"),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("feedback_client", "feedback", ["project", "client_id"], unique=False)
    op.create_index("feedback_id", "feedback", ["id", "index"], unique=False)
    op.create_index("feedback_of", "feedback", ["interaction"], unique=False)
