"""The database: opening, migrating, group commit, and what is left after a kill or on a full disk."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection

from onlinerl.errors import Conflict, SettingsError, StoreError
from onlinerl.store import interactions
from onlinerl.store.database import HEAD, MIGRATIONS, Database, Writer, migrate
from onlinerl.store.schema import metadata
from onlinerl.store.schema import tallies as table
from tests.store_helpers import opened, shown, url


def put(name: str) -> Callable[[Connection], str]:
    def operation(c: Connection) -> str:
        interactions.insert(c, [shown(name)])
        return name

    return operation


def names(database: Database) -> set[str]:
    with database.read() as c:
        return set(c.execute(sa.text("SELECT id FROM interactions")).scalars())


def test_open_makes_the_folder_and_the_promised_settings(tmp_path: Path) -> None:
    with opened(tmp_path / "new" / "home") as database:
        with database.write() as c:
            pragmas = {
                name: c.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "synchronous", "foreign_keys")
            }
            assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
        with pytest.raises(StoreError, match="readonly"), database.read() as c:
            put("x")(c)


def test_migrations_make_exactly_the_tables_of_the_schema(tmp_path: Path) -> None:
    with opened(tmp_path) as database, database.read() as c:
        context = MigrationContext.configure(c, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        made = definitions(c)
    # alembic does not compare partial indices and column order: build the metadata itself and compare that
    engine = sa.create_engine("sqlite://")
    with engine.begin() as c:
        metadata.create_all(c)
        wanted = definitions(c)
    engine.dispose()
    made.pop("alembic_version")
    assert made == wanted


def definitions(c: Connection) -> dict[str, str]:
    rows = c.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").all()
    return {str(name): " ".join(str(text).split()) for name, text in rows}


def test_head_is_the_newest_migration() -> None:
    settings = Config()
    settings.set_main_option("script_location", str(MIGRATIONS))
    assert ScriptDirectory.from_config(settings).get_current_head() == HEAD


def test_a_database_of_the_first_schema_is_brought_up_to_date_and_back(tmp_path: Path) -> None:
    def alembic(c: Connection) -> Config:
        settings = Config()
        settings.set_main_option("script_location", str(MIGRATIONS))
        settings.attributes["connection"] = c
        return settings

    engine = sa.create_engine(url(tmp_path))
    with engine.begin() as c:
        migrate(c, "0001")
        first = definitions(c)
        for name in ("a", "b"):
            c.exec_driver_sql(OLD_ROW, (name,))
    with opened(tmp_path) as database, database.write() as c:
        one = interactions.get(c, "a")
        assert one is not None
        assert (one.completion, one.propensity) == ("return x", 1.0)
        interactions.insert(c, [shown("new", propensity=0.1)])
        second = definitions(c)
    with engine.begin() as c:
        command.downgrade(alembic(c), "0001")
        assert definitions(c) == first
    with opened(tmp_path) as database:
        assert names(database) == {"a", "b", "new"}
        with database.read() as c:
            assert definitions(c) == second
            one = interactions.get(c, "new")
            assert one is not None
            assert one.propensity == 1.0  # the first schema had no place for it
    engine.dispose()


OLD_ROW = """
INSERT INTO interactions (id, "index", policy, version, version_end, arm, project, user, at, finished_at,
  prompt_hash, suffix_hash, temperature, top_p, finish, language, multiline, label, untrainable,
  verdict_source, kind, use, dropped, prompt, prompt_ids, completion, completion_ids,
  behavior_logprobs, offsets)
VALUES (?, 0, 'tab', 0, 0, 'live', 'default', 'u1', 1000, 1000.2, 'h', '', 1, 1, 'stop', 'python', 0, '', '',
  '', 'shown', 'open', '', 'def f(x):', x'05000000', 'return x', x'90010000', x'0000c0bf', x'08000000')
"""
"""As the first schema had it: it must not be written with today's code."""


def test_opening_again_keeps_the_rows(tmp_path: Path) -> None:
    with opened(tmp_path) as database, database.write() as c:
        put("kept")(c)
    with opened(tmp_path) as database:
        assert names(database) == {"kept"}


def test_four_processes_open_a_new_database_at_once(tmp_path: Path) -> None:
    code = f"""
import sys
from onlinerl.store.database import Database
from tests.store_helpers import shown
from onlinerl.store import interactions
sys.stdin.readline()
database = Database.open({url(tmp_path)!r})
with database.write() as c:
    interactions.insert(c, [shown(sys.argv[1])])
"""
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(i)], stdin=subprocess.PIPE, env=environment())
        for i in range(4)
    ]
    time.sleep(1.0)  # all of them are past their imports, and wait
    for child in children:
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.close()
    assert [child.wait(60) for child in children] == [0, 0, 0, 0]
    with opened(tmp_path) as database:
        assert names(database) == {"0", "1", "2", "3"}


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as database, database.write() as c:
        c.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreError, match=r"newer onlinerl \(schema 9999.*install that version"):
        Database.open(url(tmp_path))


@pytest.mark.parametrize("damage", [b"this is a text, and long enough to be no header" * 100, b"\0" * 8192])
def test_a_broken_file_is_refused(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "onlinerl.db").write_bytes(damage)
    with pytest.raises(StoreError, match=r"broken .*move it away"):
        Database.open(url(tmp_path))
    assert (tmp_path / "onlinerl.db").read_bytes() == damage


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "onlinerl.db")
    other.execute("CREATE TABLE interactions (x)")
    other.commit()
    other.close()
    with pytest.raises(StoreError, match="another program"):
        Database.open(url(tmp_path))


@pytest.mark.parametrize("bad", ["nonsense", "postgresql://localhost/x", "sqlite://", "sqlite:///:memory:"])
def test_a_url_that_is_no_sqlite_file_is_a_settings_error(bad: str) -> None:
    with pytest.raises(SettingsError, match="sqlite:////path"):
        Database.open(bad)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot be made"):
        Database.open(url(tmp_path / "file"))


def test_write_rolls_back_on_an_exception(tmp_path: Path) -> None:
    with opened(tmp_path) as database:

        def fail() -> None:
            with database.write() as c:
                put("x")(c)
                raise Conflict("no")

        with pytest.raises(Conflict):
            fail()
        assert names(database) == set()


def test_a_reader_sees_one_moment_and_holds_up_no_writer(tmp_path: Path) -> None:
    with opened(tmp_path) as database, database.read() as c:
        assert c.execute(sa.text("SELECT count(*) FROM interactions")).scalar() == 0
        with database.write() as w:
            put("later")(w)
        assert c.execute(sa.text("SELECT count(*) FROM interactions")).scalar() == 0


# -------------------------------------------------------------------------------------- group commit


async def test_writer_commits_many_at_once_and_answers_each(tmp_path: Path) -> None:
    with opened(tmp_path) as database:
        writer = Writer(database)
        await writer.start()
        commits = 0

        @sa.event.listens_for(database._writers, "commit")
        def _count(connection: Connection) -> None:
            nonlocal commits
            commits += 1

        answers = await asyncio.gather(*(writer.submit(put(f"n{i}")) for i in range(200)))
        assert answers == [f"n{i}" for i in range(200)]
        assert len(names(database)) == 200
        assert commits < 20
        await writer.close()


async def test_an_operations_exception_reaches_only_its_caller(tmp_path: Path) -> None:
    def fail(c: Connection) -> None:
        put("undone")(c)
        raise Conflict("not me")

    def wrong(c: Connection) -> None:
        c.exec_driver_sql("SELECT nothing FROM nowhere")

    with opened(tmp_path) as database:
        writer = Writer(database)
        await writer.start()
        operations = [put("a"), fail, put("b"), wrong, put("c")]
        answers = await asyncio.gather(*map(writer.submit, operations), return_exceptions=True)
        assert [answers[i] for i in (0, 2, 4)] == ["a", "b", "c"]
        assert isinstance(answers[1], Conflict)
        assert isinstance(answers[3], StoreError)
        assert names(database) == {"a", "b", "c"}
        await writer.close()


async def test_a_caller_that_leaves_does_not_undo_its_operation(tmp_path: Path) -> None:
    with opened(tmp_path) as database:
        writer = Writer(database)
        await writer.start()
        task = asyncio.create_task(writer.submit(put("left")))
        await asyncio.sleep(0)
        task.cancel()
        await writer.close()
        assert names(database) == {"left"}


async def test_close_finishes_what_waits_and_refuses_the_rest(tmp_path: Path) -> None:
    with opened(tmp_path) as database:
        writer = Writer(database)
        await writer.start()
        tasks = [asyncio.create_task(writer.submit(put(f"n{i}"))) for i in range(50)]
        await asyncio.sleep(0)
        await writer.close()
        assert len(await asyncio.gather(*tasks)) == 50
        with pytest.raises(StoreError, match="shutting down"):
            await writer.submit(put("late"))
        assert len(names(database)) == 50


async def test_a_failed_commit_reaches_everybody_of_the_group(tmp_path: Path) -> None:
    with opened(tmp_path) as database:
        writer = Writer(database)
        await writer.start()
        refuse = True

        @sa.event.listens_for(database._writers, "commit")
        def _refuse(connection: Connection) -> None:
            if refuse:
                raise sqlite3.OperationalError("database or disk is full")

        answers = await asyncio.gather(
            *(writer.submit(put(f"n{i}")) for i in range(9)), return_exceptions=True
        )
        assert all(isinstance(answer, StoreError) for answer in answers)
        assert names(database) == set()
        refuse = False
        assert await writer.submit(put("again")) == "again"
        await writer.close()


async def test_a_busy_writer_lets_others_write(tmp_path: Path) -> None:
    waits: list[float] = []
    done = False

    def others() -> None:
        with opened(tmp_path) as second:
            for _ in range(10):
                start = time.monotonic()
                with second.write() as c:
                    c.exec_driver_sql("UPDATE tallies SET shown = shown")
                waits.append(time.monotonic() - start)

    with opened(tmp_path) as database:
        writer = Writer(database)
        await writer.start()

        async def user(name: int) -> None:
            i = 0
            while not done:
                await writer.submit(put(f"{name}-{i}"))
                i += 1

        users = [asyncio.create_task(user(name)) for name in range(16)]
        await asyncio.to_thread(others)
        done = True
        await asyncio.gather(*users)
        await writer.close()
    assert len(waits) == 10
    assert sum(waits) < 5.0  # single ones took up to 3 s where SQLite's own waiting was left to it


async def test_the_lock_is_waited_for_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onlinerl.store.database.BUSY", 0.2)
    with opened(tmp_path) as database, opened(tmp_path) as second:
        with (
            database.write(),
            pytest.raises(StoreError, match="locked by another process"),
            second.write(),
        ):
            pass
        with second.write() as c:
            put("then")(c)
        assert names(database) == {"then"}


# ------------------------------------------------------------------------- killed, and without room


def environment() -> dict[str, str]:
    root = Path(__file__).parent.parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(root / "src"), str(root)))}


WRITING = """
import asyncio, sys
from onlinerl.store.database import Database, Writer
from tests.test_database import put

async def main(url):
    database = Database.open(url)
    writer = Writer(database)
    await writer.start()

    async def one(worker):
        i = 0
        while True:
            name = await writer.submit(put(f"{worker}-{i}"))
            print(name, flush=True)
            i += 1

    await asyncio.gather(*(one(worker) for worker in range(8)))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_writer_process_keeps_what_it_acknowledged(tmp_path: Path, seed: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITING, url(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert child.stdout is not None
    acknowledged = [child.stdout.readline().strip()]
    time.sleep(random.Random(seed).uniform(0.05, 0.6))
    child.send_signal(signal.SIGKILL)
    acknowledged += child.stdout.read().split("\n")[:-1]
    child.stdout.close()
    child.wait(10)
    with opened(tmp_path) as database:
        assert set(acknowledged) <= names(database)
        with database.read() as c:
            assert c.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
            counted = c.execute(sa.select(sa.func.sum(table.c.opportunities))).scalar()
        assert counted == len(names(database))
    assert len(acknowledged) > 8


FILLING = """
import asyncio, resource, signal, sys
from onlinerl.errors import StoreError
from onlinerl.store.database import Database, Writer
from tests.test_database import put

async def main(url):
    database = Database.open(url)
    writer = Writer(database)
    await writer.start()
    # Files may grow by this much and no more: SQLite sees its write refused, as on a full disk.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    refused = 0
    for i in range(400):
        answers = await asyncio.gather(
            *(writer.submit(put(f"{i}-{j}")) for j in range(4)), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, str):
                print(answer)
            elif isinstance(answer, StoreError) and "make room" in str(answer):
                refused += 1
            else:
                raise AssertionError(answer)
        if refused > 8:
            break
    assert refused > 8, refused
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    print(await writer.submit(put("after")))
    await writer.close()

asyncio.run(main(sys.argv[1]))
"""


def test_full_disk_refuses_clearly_and_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-c", FILLING, url(tmp_path)],
        capture_output=True, text=True, timeout=60, env=environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    acknowledged = set(done.stdout.split())
    assert len(acknowledged) > 8
    with opened(tmp_path) as database:
        assert names(database) == acknowledged
