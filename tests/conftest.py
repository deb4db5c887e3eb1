"""What all tests share: no test touches the user's own caches or MLflow store."""

import os
import tempfile

_HOME = tempfile.TemporaryDirectory(prefix="opcast-tests-")
os.environ["OPCAST_CACHE"] = _HOME.name
os.environ["OPCAST_MLRUNS"] = os.path.join(_HOME.name, "mlruns")  # noqa: PTH118
