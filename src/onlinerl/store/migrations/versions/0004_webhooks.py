"""The history of runs, and how far webhooks have been told of it all."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "run_changes",
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("run", sa.Integer(), nullable=False),
        sa.Column("from_state", sa.String(length=16), nullable=False),
        sa.Column("to_state", sa.String(length=16), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("run_changes_of", "run_changes", ["policy", "seq"], unique=False)
    op.create_table(
        "webhooks",
        sa.Column("target", sa.String(length=16), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("audit", sa.Integer(), nullable=False),
        sa.Column("decisions", sa.Integer(), nullable=False),
        sa.Column("run_changes", sa.Integer(), nullable=False),
        sa.Column("delivered", sa.Integer(), nullable=False),
        sa.Column("dropped", sa.Integer(), nullable=False),
        sa.Column("failing_at", sa.Double(), nullable=True),
        sa.Column("error", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("target", "policy"),
    )


def downgrade() -> None:
    op.drop_table("webhooks")
    op.drop_index("run_changes_of", "run_changes")
    op.drop_table("run_changes")
