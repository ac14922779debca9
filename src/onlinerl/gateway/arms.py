"""Which arm a request is served in: drawn here, once, from what is known in this process.

pinned → hold-out → exploring → an arm of the running experiment → live. Nothing here waits or asks the store:
a lot needs no memory (`experiments.assignment`), and the running experiment comes from the publisher.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from onlinerl.experiments import assignment
from onlinerl.experiments.assignment import EXPLORE, HOLDOUT, LIVE
from onlinerl.gateway.service import Route, Services
from onlinerl.records import Arm

FIRST = 0
"""The version that the hold-out stays on."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What of a request decides its arm. Made by the endpoint."""

    id: str
    user: str
    """Sticky key, or ""."""
    project: str
    path: str
    """Of the file that it is about, or ""."""
    at: float
    repeatable: bool
    """It gives a seed or asks for temperature 0: it is never explored."""


def draw(route: Route, asked: Asked, services: Services) -> Route:
    """The route of a request that would be served live, in the arm that it is drawn into.

    Who explores takes part in no experiment: what is sampled hotter would compare temperatures, and without
    exploring clients that sample cold would teach nothing for as long as an experiment runs. Who is assigned
    stays so in the record also where the arm's version cannot be served: live serves rather than nobody.
    """
    if route.arm != LIVE:
        return route
    service, settings = route.service, route.service.settings
    if assignment.holdout(settings.experiments, policy=service.name, user=asked.user):
        held = replace(route, arm=HOLDOUT, propensity=settings.experiments.holdout)
        return serving(held, Arm(service.name, FIRST), services)
    if not asked.repeatable:
        drawn = assignment.exploration(
            settings.exploration, policy=service.name, user=asked.user, request=asked.id
        )
        route = replace(route, arm=drawn.arm, propensity=drawn.propensity)
        if drawn.arm == EXPLORE:
            return route
    experiment = service.experiment()
    if experiment is None:
        return route
    found = assignment.experimental(
        experiment,
        settings.experiments,
        user=asked.user,
        project=asked.project,
        path=asked.path,
        at=asked.at,
    )
    if found is None:
        return route
    placed = replace(
        route, arm=found.arm, propensity=found.propensity, experiment=found.experiment, unit=found.unit
    )
    arm = experiment.treatment if found.arm == assignment.TREATMENT else experiment.control
    return serving(placed, arm, services)


def serving(route: Route, arm: Arm, services: Services) -> Route:
    """The route to an arm's version, where some engine of this server holds it; else as it was.

    An upstream has no version: it would be routed to from here.
    """
    service = services.by_name.get(arm.policy)
    if arm.version is None or service is None or arm.version not in service.pool.servable():
        return route
    return replace(route, service=service, version=arm.version)
