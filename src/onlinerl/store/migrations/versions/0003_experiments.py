"""Experiments, their decisions, and which interactions count in them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "experiments",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("control", sa.Text(), nullable=False),
        sa.Column("treatment", sa.Text(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("salt", sa.Text(), nullable=False),
        sa.Column("tau", sa.Double(), nullable=False),
        sa.Column("alpha", sa.Double(), nullable=False),
        sa.Column("stage", sa.Integer(), nullable=False),
        sa.Column("stage_at", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("rewards", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "experiments_one_open",
        "experiments",
        ["policy"],
        unique=True,
        sqlite_where=sa.text("state IN ('running', 'waiting')"),
        postgresql_where=sa.text("state IN ('running', 'waiting')"),
    )
    op.create_table(
        "decisions",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("experiment", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("stage", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("proposed", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("numbers", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("decisions_of", "decisions", ["experiment", "seq"], unique=False)
    op.add_column("interactions", sa.Column("experiment", sa.Integer(), nullable=True))
    op.add_column("interactions", sa.Column("unit", sa.Text(), server_default=sa.text("''"), nullable=False))
    op.add_column("interactions", sa.Column("characters", sa.Integer(), nullable=True))
    op.create_index(
        "interactions_experiment",
        "interactions",
        [
            *(
                "experiment",
                "unit",
                "arm",
                "at",
                "finished_at",
                "kind",
                "verdict",
                "verdict_source",
                "finish",
            ),
            *("score", "retained_characters", "characters"),
        ],
        unique=False,
        sqlite_where=sa.text("experiment IS NOT NULL"),
        postgresql_where=sa.text("experiment IS NOT NULL"),
    )
    # Charts count by version in the index that the label rate has, and feedback by its status.
    op.drop_index("interactions_kind", "interactions")
    op.create_index(
        "interactions_kind",
        "interactions",
        ["policy", "kind", "at", "verdict", "version", "verdict_source"],
        unique=False,
    )
    op.create_index("feedback_recent", "feedback", ["at", "status"], unique=False)


def downgrade() -> None:
    op.drop_index("feedback_recent", "feedback")
    op.drop_index("interactions_kind", "interactions")
    op.create_index("interactions_kind", "interactions", ["policy", "kind", "at", "verdict"], unique=False)
    op.drop_index("interactions_experiment", "interactions")
    op.drop_column("interactions", "characters")
    op.drop_column("interactions", "unit")
    op.drop_column("interactions", "experiment")
    op.drop_table("decisions")
    op.drop_table("experiments")
