"""HTTP server that predicts programs, kernels, training steps and serving, and answers in JSON.

``app.py`` defines the endpoints, and ``guard.py`` enforces limits in front of them. Kernels are
predicted in batches and cached (``kernels.py``); untrusted input is parsed in separate processes
(``sandbox.py``, ``fork_server.py``). ``cli/serving.py`` starts the server.
"""

from .settings import ServerSettings

__all__ = ["ServerSettings"]
