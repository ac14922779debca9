"""Alembic migrations, run by `Database.open`. Append only: a released one never changes."""
