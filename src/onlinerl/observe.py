"""What can be seen from outside: logs (structlog) and metrics (Prometheus), all in one place.

Logs never hold prompts, completions or keys: pass ids, counts, names and durations only. Labels of
metrics come from small closed sets (policy names, route templates, states), never from clients.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import Counter, Gauge, Histogram

logger = structlog.get_logger
"""`logger(component="gateway")` gives a bound logger."""

_FAST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.375, 0.5, 0.75, 1, 2, 5, 10, 30)
_SLOW = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)

# --------------------------------------------------------------------------------------- gateway

REQUESTS = Counter(
    "onlinerl_http_requests", "Requests answered, by route template and status.", ("route", "status")
)
DURATION = Histogram(
    "onlinerl_http_request_seconds",
    "From the request's head to the answer's last byte.",
    ("route",),
    buckets=_FAST,
)
FIRST_TOKEN = Histogram(
    "onlinerl_first_token_seconds", "From the request to the first sampled token.", ("policy",), buckets=_FAST
)
TOKEN_GAP = Histogram(
    "onlinerl_token_gap_seconds", "Between two sampled tokens of one sequence.", ("policy",), buckets=_FAST
)
PROMPT_TOKENS = Counter("onlinerl_prompt_tokens", "Prompt tokens of served requests.", ("policy",))
SAMPLED_TOKENS = Counter("onlinerl_sampled_tokens", "Tokens sampled for clients.", ("policy",))
INTERACTIONS = Counter(
    "onlinerl_interactions",
    "Interactions recorded, by version and how they ended.",
    ("policy", "version", "finish"),
)
OPEN_ANSWERS = Gauge("onlinerl_open_answers", "Requests that are being answered now.", ("policy",))
ENGINE_FAILURES = Counter(
    "onlinerl_engine_failures",
    "Requests that an engine failed: before the first token, or after it.",
    ("policy", "when"),
)
FEEDBACK = Counter(
    "onlinerl_feedback",
    "Feedback received, by protocol, event and what became of it.",
    ("source", "event", "status"),
)
JOINS = Counter(
    "onlinerl_joins",
    "How feedback found its interaction: id, client, prompt, text, or none.",
    ("source", "by"),
)

# ----------------------------------------------------------------------------------------- store

COMMIT = Histogram("onlinerl_store_commit_seconds", "One group commit, fsync included.", buckets=_FAST)
COMMIT_SIZE = Histogram(
    "onlinerl_store_commit_operations",
    "Operations that shared one group commit.",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
)

# ------------------------------------------------------------------------------- engines, versions

LIVE_VERSION = Gauge("onlinerl_live_version", "Version that new requests get.", ("policy",))
REPLICAS = Gauge("onlinerl_replicas", "Replicas that answer.", ("policy",))
REPLICA_RESTARTS = Counter("onlinerl_replica_restarts", "Replicas restarted after they died.", ("policy",))
PUBLISH = Histogram(
    "onlinerl_publish_seconds",
    "Time to put a version into the engines: stage (loaded everywhere), activate (new requests get it).",
    ("policy", "stage"),
    buckets=_SLOW,
)
LOAD_FAILURES = Counter(
    "onlinerl_load_failures",
    "Versions that an engine failed to load, or whose files are broken.",
    ("policy",),
)

# ----------------------------------------------------------------------------------------- runs

RUNS = Counter("onlinerl_runs", "Training runs started by the trigger, by reason.", ("policy", "reason"))
RUNNING = Gauge("onlinerl_run_active", "1 while a training run is active.", ("policy",))
LEFT_OUT = Gauge(
    "onlinerl_left_out",
    "Rated answers that runs left out so far, by reason.",
    ("policy", "reason"),
)
ANSWERS = Gauge(
    "onlinerl_answers",
    "Answers of a version so far, by what became of them: opportunities, shown, silent, accepted, rejected, "
    "timeout. Read from the store, so it goes on after a restart.",
    ("policy", "version", "outcome"),
)
RUN_BATCHES = Gauge("onlinerl_run_batches", "Batches of the newest run.", ("policy",))
DIFFERENCE = Gauge(
    "onlinerl_experiment_difference",
    "Reward per opportunity, treatment less control, of the running experiment: low, estimate, high; NaN "
    "while there is no interval.",
    ("policy", "bound"),
)

# ----------------------------------------------------------------------------------- experiments

EXPERIMENT = Gauge("onlinerl_experiment", "The experiment that runs; 0: none does.", ("policy",))
EXPERIMENTS = Counter(
    "onlinerl_experiment_decisions",
    "What was decided about experiments by themselves, proposals included, by kind.",
    ("policy", "kind"),
)


def configure_logging(json: bool | None = None, file: Path | None = None) -> None:
    """Send all logs, the standard library's too, through structlog to standard error or `file`.

    json: JSON lines instead of coloured text; None: JSON unless the target is a terminal.
    """
    if json is None:
        json = file is not None or not sys.stderr.isatty()
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    final: list[Any] = (
        # no show_locals anywhere: local variables hold prompts
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        else [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    )
    handler: logging.Handler = (
        logging.StreamHandler(sys.stderr) if file is None else logging.FileHandler(file, encoding="utf-8")
    )
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        # our own of an earlier call; what others hung there is theirs
        if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter):
            root.removeHandler(old)
            old.close()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for noisy in ("httpx", "httpcore", "aiohttp.access", "uvicorn", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
