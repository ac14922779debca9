"""The database itself: opening and migrating it, transactions, and group commit for servers."""

from __future__ import annotations

import asyncio
import queue
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError

from onlinerl.errors import OnlineRLError, SettingsError, StoreError

T = TypeVar("T")

BUSY = 15.0
"""Seconds that a writer waits for another process's transaction before it gives up."""
MIGRATIONS = Path(__file__).parent / "migrations"
HEAD = "0004"
"""The newest migration; a test holds it against the files."""
GROUP = 512
"""Most operations in one transaction of the Writer: bounds how long the first of them waits."""
GAP = 0.001
"""Seconds that a busy Writer leaves between two transactions, so that other processes can write too."""


def file_of(url: str) -> Path:
    """The file of a database, which need not exist. Raises SettingsError as `Database.open`."""
    return Path(_parse(url).database or "")


def _parse(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError):  # ValueError: a port that is no number
        # Not quoted: nobody can tell where in it a password stands.
        raise SettingsError("store.url is not a database URL; write sqlite:////path/to/file.db") from None
    ours = parsed.drivername in ("sqlite", "sqlite+pysqlite")
    if not ours or not parsed.database or parsed.database == ":memory:":
        raise SettingsError(
            f"store.url {parsed.render_as_string()!r} is not supported: write sqlite:////path/to/file.db"
        )
    return parsed


class Database:
    """A SQLite file in WAL mode, shared by all processes of one installation.

    Every commit is durable before it returns (`synchronous=FULL`). Thread-safe. Use `open`.
    """

    def __init__(self, url: sa.URL) -> None:
        self.url = url
        # Readers get connections that cannot write: a read that writes is a fault, and says so.
        self._readers = _engine(url, _begin_snapshot, read_only=True)
        self._writers = _engine(url, _begin_writing, read_only=False)

    @classmethod
    def open(cls, url: str) -> Database:
        """Make the folder and the file where missing, bring the schema up to date, return the database.

        Safe when several processes do it at once. Raises SettingsError for a URL that is none or not
        SQLite's, StoreError when the file is broken, not ours, or made by a newer onlinerl.
        """
        parsed = _parse(url)
        folder = file_of(url).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"the folder {folder} of the database cannot be made: {error.strerror}"
            ) from None
        database = cls(parsed)
        try:
            database._prepare()
        except BaseException:  # whatever it is goes on up; the handles must not stay open
            database.close()
            raise
        return database

    def _prepare(self) -> None:
        deadline = time.monotonic() + BUSY
        while True:
            try:
                with _explained(self.url):
                    connection = self._writers.raw_connection()
                    try:
                        connection.cursor().execute("PRAGMA journal_mode=WAL").close()
                    finally:
                        connection.close()
                break
            except StoreError as error:
                # SQLite does not wait for others when it changes the journal's mode: they may be doing it.
                if "is locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        with self.read() as c:
            ready = self._ready(c)
        if not ready:
            with self.write() as c:  # whoever comes second waits here, then finds it done
                if not self._ready(c):
                    migrate(c)

    def _ready(self, c: Connection) -> bool:
        """Whether the schema is the newest. Raises StoreError for one that is not ours or newer."""
        tables = set(sa.inspect(c).get_table_names())
        if not tables:
            return False
        if "alembic_version" not in tables:
            raise StoreError(
                f"{self.url.database} is a database of another program; choose another file in store.url"
            )
        revision = c.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
        known = {path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py")}
        if revision is not None and revision not in known:
            raise StoreError(
                f"{self.url.database} was made by a newer onlinerl (schema {revision}, "
                f"this one knows {HEAD}): install that version, or choose another --home"
            )
        return revision == HEAD

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A snapshot: all that is read inside belongs to one moment; writers are not held up."""
        with _explained(self.url), self._readers.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """The only writer until the end: on disk when it is left, rolled back on an exception."""
        with _explained(self.url), self._writers.begin() as connection:
            yield connection

    def close(self) -> None:
        """Give back every file handle."""
        self._readers.dispose()
        self._writers.dispose()


def migrate(connection: Connection, revision: str = "head") -> None:
    """Run the missing migrations in the connection's transaction."""
    # Alembic takes a third of a second to import, and is needed once in a database's life.
    from alembic import command
    from alembic.config import Config

    settings = Config()
    settings.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    settings.attributes["connection"] = connection
    command.upgrade(settings, revision)


def _engine(url: sa.URL, begin: Callable[[sqlite3.Connection], None], *, read_only: bool) -> sa.Engine:
    engine = sa.create_engine(
        url,
        connect_args={"timeout": BUSY},
        pool_size=8,
        max_overflow=64,
        hide_parameters=True,  # they are people's code, and an exception's text ends in logs
    )

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None  # transactions begin where SQLAlchemy says so, and as we say below
        try:
            for pragma in (
                "synchronous=FULL",
                "foreign_keys=ON",
                f"query_only={'ON' if read_only else 'OFF'}",
            ):
                connection.execute(f"PRAGMA {pragma}").close()
        except sqlite3.Error:
            connection.close()  # the pool does not know it yet
            raise

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        driver = connection.connection.driver_connection
        if not isinstance(driver, sqlite3.Connection):
            raise AssertionError(f"{driver!r} is no SQLite connection")
        begin(driver)

    return engine


def _begin_snapshot(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN").close()


def _begin_writing(connection: sqlite3.Connection) -> None:
    """Wait for the write lock. SQLite's own waiting looks at it every 100 ms in the end, and so finds the
    short gaps of a busy writer by luck alone: seconds, measured. This one looks every millisecond or two."""
    deadline = time.monotonic() + BUSY
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE").close()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0.0005, 0.002))


@contextmanager
def _explained(url: sa.URL) -> Iterator[None]:
    """Turn the driver's refusals into StoreError; faults in our own SQL stay what they are."""
    try:
        yield
    except IntegrityError:
        raise
    except DBAPIError as error:
        raise StoreError(_sentence(str(error.orig), url)) from error
    except sqlite3.Error as error:  # while a connection is made, nobody has wrapped it yet
        raise StoreError(_sentence(str(error), url)) from error


def _sentence(text: str, url: sa.URL) -> str:
    where = url.database
    if "disk is full" in text or "disk I/O error" in text:
        return f"the disk of {where} is full or failing ({text}): make room, nothing was written"
    if "locked" in text or "busy" in text:
        return f"the database {where} is locked by another process ({text}): try again"
    if "not a database" in text or "malformed" in text:
        return (
            f"the database {where} is broken ({text}): move it away together with its -wal and -shm files, "
            "or put a backup in its place"
        )
    if "unable to open" in text or "readonly" in text:
        return (
            f"the database {where} cannot be opened for writing ({text}): check the path and its permissions"
        )
    return f"the database {where} refused: {text}"


# ------------------------------------------------------------------------------------ group commit


@dataclass(slots=True)
class _Waiting:
    operation: Callable[[Connection], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


@dataclass(slots=True)
class _Outcome:
    waiting: _Waiting
    result: Any = None
    error: BaseException | None = None


class Writer:
    """Group commit for asyncio servers.

    One thread takes all operations that wait, runs them in one transaction, each in a SAVEPOINT of its
    own, commits (one fsync for all), and only then answers. An operation's own exception undoes that
    operation alone; a failed commit reaches everybody of the group as StoreError.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="store-writer", daemon=True)
            self._thread.start()

    async def close(self) -> None:
        """Refuse new operations, finish those that wait, end the thread."""
        if self._closed or self._thread is None:
            self._closed = True
            return
        self._closed = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    async def submit(self, operation: Callable[[Connection], T]) -> T:
        """Run `operation` in the writer's thread; returns once its transaction is on disk.

        Cancelling the wait does not cancel the operation: what a client left behind is still recorded.
        Raises what the operation raises, and StoreError when the database refuses.
        """
        if self._closed or self._thread is None:
            raise StoreError("the store is closed: the server is shutting down")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._queue.put(_Waiting(operation, loop, future))
        return await future

    def _work(self) -> None:
        ending = False
        while not ending:
            first = self._queue.get()
            group: list[_Waiting] = []
            while True:
                if first is None:
                    ending = True
                else:
                    group.append(first)
                if ending or len(group) >= GROUP:
                    break
                try:
                    first = self._queue.get_nowait()
                except queue.Empty:
                    break
            if group:
                _answer(self._commit(group))
                if not self._queue.empty():
                    time.sleep(GAP)

    def _commit(self, group: list[_Waiting]) -> list[_Outcome]:
        outcomes: list[_Outcome] = []
        try:
            with self._database.write() as connection:
                for waiting in group:
                    outcomes.append(self._apply(connection, waiting))
        except Exception as error:  # noqa: BLE001  isolated: a refused commit fails its group, not the thread
            failure = error if isinstance(error, OnlineRLError) else StoreError(f"the commit failed: {error}")
            return [_Outcome(waiting, error=failure) for waiting in group]
        return outcomes

    def _apply(self, connection: Connection, waiting: _Waiting) -> _Outcome:
        savepoint = connection.begin_nested()
        try:
            with _explained(self._database.url):
                result = waiting.operation(connection)
                savepoint.commit()
        except Exception as error:  # isolated: it is the caller's, the group goes on
            driver = connection.connection.driver_connection
            if isinstance(driver, sqlite3.Connection) and not driver.in_transaction:
                raise  # a full disk made SQLite undo the whole transaction: nothing of the group stands
            savepoint.rollback()
            return _Outcome(waiting, error=error)
        return _Outcome(waiting, result=result)


def _answer(outcomes: list[_Outcome]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome.waiting.loop, []).append(outcome)
    for loop, theirs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, theirs)
        except RuntimeError:
            continue  # that loop is closed: nobody waits any more


def _resolve(outcomes: list[_Outcome]) -> None:
    for outcome in outcomes:
        future = outcome.waiting.future
        if future.done():
            continue  # the caller left
        if outcome.error is not None:
            future.set_exception(outcome.error)
        else:
            future.set_result(outcome.result)


__all__ = ["Database", "Writer", "migrate"]
