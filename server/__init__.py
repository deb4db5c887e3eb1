"""The HTTP server: programs, kernels and plans come in as requests, predictions go out as JSON.

``app.py`` has the endpoints, ``guard.py`` the limits before them. Kernels are answered from a cache
(``cache.py``) and in batches (``batching.py``); whatever has to be parsed runs in a process of its
own (``sandbox.py``, ``fork_server.py``, ``jobs.py``). ``cli/serve.py`` at the root starts it.
"""

from .settings import ServerSettings

__all__ = ["ServerSettings"]
