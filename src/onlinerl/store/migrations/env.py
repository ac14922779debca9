"""Alembic's entry point: runs the migrations on the connection and in the transaction it is handed."""

from __future__ import annotations

from alembic import context

from onlinerl.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transaction_per_migration=False,
    # SQLite cannot alter most things in place; Alembic then rebuilds the table.
    render_as_batch=True,
)
context.run_migrations()
