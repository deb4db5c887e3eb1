"""The HTTP server: programs, kernels and plans in, predictions as JSON out.

``app.py`` has the endpoints, ``guard.py`` the limits in front of them. Kernels are answered from a
cache and in batches (``kernels.py``); whatever must be parsed runs in a process of
its own (``sandbox.py``, ``fork_server.py``). ``cli/serving.py`` starts it.
"""

from .settings import ServerSettings

__all__ = ["ServerSettings"]
