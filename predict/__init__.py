"""Predictions: program, device and model in; latency with an interval and an explanation out.

``api.py`` and ``program/predictor.py`` are the public entries (``opcast.predict``,
``opcast.load``), ``cluster/`` predicts steps and partitioned programs, ``operator/`` single library
operators, ``published/`` published tables and op graphs. ``render/``, ``page/`` and ``export/``
turn predictions into text, HTML and files.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """This package, which is also the function ``opcast.predict(program, …)``.

    Importing anything below it binds its name in ``opcast``, which would hide a function there.
    """

    def __call__(self, program: object, *args: object, **options: Any) -> object:
        """Predict a program; see :func:`opcast.predict.api.predict`."""
        from .api import predict

        return predict(program, *args, **options)


sys.modules[__name__].__class__ = _CallableModule
