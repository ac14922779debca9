"""Propensities and rewards of interactions, and the numbers of a run's steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "steps",
        sa.Column("run", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("batch", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("numbers", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "batch"),
    )
    # Whatever was served so far was served to everybody alike: with probability 1.
    op.add_column(
        "interactions",
        sa.Column("propensity", sa.Double(), server_default=sa.text("1.0"), nullable=False),
    )
    op.add_column("interactions", sa.Column("reward", sa.Double(), nullable=True))
    op.add_column("interactions", sa.Column("reward_parts", sa.Text(), nullable=True))
    op.create_index(
        "interactions_dropped",
        "interactions",
        ["policy", "run", "dropped", "use"],
        unique=False,
        sqlite_where=sa.text("use = 'dropped'"),
        postgresql_where=sa.text("use = 'dropped'"),
    )


def downgrade() -> None:
    op.drop_index("interactions_dropped", "interactions")
    op.drop_column("interactions", "reward_parts")
    op.drop_column("interactions", "reward")
    op.drop_column("interactions", "propensity")
    op.drop_table("steps")
