"""XGBoost without scikit-learn, in processes of ours alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from opcast.models.estimators.xgboost_import import hidden

_LOADED = """
import sys
import opcast
from opcast.models.estimators import xgboost_import
{first}
opcast.load()
import xgboost
from sklearn.linear_model import Ridge
print(xgboost.compat.SKLEARN_INSTALLED)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "whole"), [("xgboost_import.own_process()", "False"), ("", "True")]
)
def test_a_user_keeps_xgboost_whole(first: str, whole: str) -> None:
    code = _LOADED.format(first=first)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [whole]


def test_a_hidden_package_comes_back() -> None:
    with hidden("wave"), pytest.raises(ImportError):
        import wave
    import wave

    with hidden("wave"):
        assert sys.modules["wave"] is wave
