"""Conformal intervals of collectives, by how well the machine is measured.

The score of a measurement is ``log(measured / predicted)`` by a model fitted without it. There are
four kinds of scores: of a ``known`` machine (its other rows were fitted), of a ``new`` one (every
machine of its architecture was held out), of a ``foreign`` one (in addition, no other machine had
rows of the library's operation on that fabric), and of a machine ``calibrated`` on its owner's
rows. Bounds are the 5 % and 95 % quantiles with the finite-sample correction of split-conformal
prediction (Vovk et al., 2005), by fabric, kind of library and size if there are enough scores, and
otherwise pooled.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..trust.calibrator import Calibrator
from .table import CUSTOM_BACKENDS, CollectiveTable

#: Fewest scores for separate bounds; 19 is the least for two 5 % tails.
MIN_SCORES = 20
#: Bounds without any score, and the narrowest for foreign machines: a factor of three either way.
#: Engineering estimate; not fitted. (The plain ring errs by 33 to 69 % in the median, by fabric and
#: library: docs/collectives.md.)
UNKNOWN = (-float(np.log(3.0)), float(np.log(3.0)))
#: Upper bounds in bytes of the small and the middle sizes, 32 KiB and 2 MiB: about where the
#: protocols change in :data:`~opcast.models.collectives.curve.START`.
SIZE_EDGES = (32768.0, 2097152.0)


class Intervals(Calibrator[str]):
    """Interval bounds in log space, by prefixes of ``scope/fabric/library/size``."""

    def learn(self, scope: str, table: CollectiveTable, scores: np.ndarray) -> None:
        """Calibrate the bounds of ``scope`` on scores, shape ``(n,)``, where there are enough."""
        self.pool(scores, *zip(*_chains(scope, table), strict=True), least=MIN_SCORES)

    def find(self, scopes: np.ndarray, table: CollectiveTable) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bounds in log space, at most and at least 0, shape ``(n,)`` each."""
        lower, upper = np.zeros(len(table)), np.zeros(len(table))
        for scope in set(scopes.tolist()):
            for i, chain in enumerate(_chains(str(scope), table)):
                if scopes[i] == scope:
                    # A scope without scores, such as machines calibrated on few rows, takes the
                    # bounds of unmeasured machines.
                    lower[i], upper[i] = self.of((*chain, "new"), UNKNOWN)
        # Few libraries were entirely held out, so their scores may be narrow by chance.
        apart = scopes == "foreign"
        lower[apart] = np.minimum(lower[apart], UNKNOWN[0])
        upper[apart] = np.maximum(upper[apart], UNKNOWN[1])
        return np.minimum(lower, 0.0), np.maximum(upper, 0.0)


def library_kind(backend: str) -> str:
    """Kind of a library: ``custom`` (of a framework), ``eager`` (issued by the host), or itself."""
    if backend.endswith("_eager"):
        return "eager"
    return "custom" if backend in CUSTOM_BACKENDS else backend


def _chains(scope: str, table: CollectiveTable) -> Iterator[tuple[str, ...]]:
    size = np.digitize(table.points.size, SIZE_EDGES)
    for fabric, backend, part in zip(table.fabric, table.backend, size, strict=True):
        library = library_kind(str(backend))
        yield (
            f"{scope}/{fabric}/{library}/{part}",
            f"{scope}/{fabric}/{library}",
            f"{scope}/{fabric}",
            scope,
        )
