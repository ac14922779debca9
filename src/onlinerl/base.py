"""Version 0 of a policy: the base model, imported once, live until something better is.

Whoever comes first makes it: `serve`, `train`, or a run that was started without either.
"""

from __future__ import annotations

from onlinerl.config import Settings
from onlinerl.store import versions
from onlinerl.store.database import Database
from onlinerl.weights import directory
from onlinerl.weights.models import resolve_model


def ensure(settings: Settings, policy: str, database: Database, *, same_model: bool = True) -> None:
    """Import and register version 0 where it is missing; safe when several processes do it at once.

    Raises ModelError for a model that is missing or broken, and when version 0 came from another model
    than the settings name now. Without `same_model` that is not looked at once version 0 is registered: a
    run learns from the live version and needs the model's own folder no more.
    """
    if not same_model:
        with database.read() as c:
            if versions.find(c, policy, 0) is not None:
                return
    model = resolve_model(settings.policies[policy].model)
    version = directory.import_base(settings.weights_url, policy, model)
    with database.write() as c:
        if versions.find(c, policy, version.id) is None:
            versions.register(c, version)
