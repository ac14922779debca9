"""What a verdict is worth: τ, and the weight of a timeout. Runs learn by it, experiments compare by it."""

from __future__ import annotations

from onlinerl import config

ONLY_TIMEOUTS = frozenset({"continue", "fork"})
"""Sources that cannot report an explicit reject: every one of theirs is a timeout. Weighing it less would
move the break-even point away from τ, so it weighs 1."""


def auto_tau(accepted: int, opportunities: int, limit: float) -> float:
    """Half of the accepts per *opportunity* (silent and cancelled ones included), at most `limit`.

    Per shown answer it would ratchet: the more silent the policy, the higher its accept rate, the higher τ.
    Without any opportunity there is nothing to halve: 0, which never pays silence.
    """
    if opportunities <= 0:
        return 0.0
    return min(limit, 0.5 * accepted / opportunities)


def tau(settings: config.Policy, accepted: int, opportunities: int) -> float:
    """τ of what starts now, from the policy's counts so far. Mode `raw` is the seed's setting, whose rewards
    are 1 and 0: its τ is 0."""
    if settings.rewards.tau != "auto":
        return settings.rewards.tau
    if settings.train.mode == "raw":
        return 0.0
    return auto_tau(accepted, opportunities, settings.rewards.tau_limit)
