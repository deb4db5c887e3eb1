"""The page at ``/``: forms that ask this server, and what it answers."""

from __future__ import annotations

from .. import __version__
from ..predict.page.assemble import Page, assemble
from ..simulate.clusters.catalogue import cluster_names
from ..simulate.serving.policies import frameworks
from ..simulate.step.presets import preset_names
from . import schemas
from .service import Service

_SCRIPTS = ("breakdown.js", "ask.js", "answers.js", "explore.js")
_TITLE = "opcast: how long will it take?"


def explorer_page(service: Service) -> str:
    """Make the page; it names what the server knows, and fetches nothing else to begin with.

    Args:
        service: Its devices and models, and whether it compiles.
    """
    data = {
        "version": __version__,
        "devices": [
            {"name": d["name"], "platform": d["platform"], "learned": d["learned"]}
            for d in service.devices()
        ],
        "models": list(service.predictors),
        "workloads": preset_names(),
        "clusters": cluster_names(),
        "frameworks": sorted(frameworks()),
        "compiles": service.settings.allow_compile,
        "secured": bool(service.settings.token),
        "example": schemas.PROGRAM,
    }
    return assemble(Page(_TITLE, data, _SCRIPTS, asks=True))
