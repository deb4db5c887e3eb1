"""XGBoost without scikit-learn, in processes of ours alone; predictions without what they lack."""

from __future__ import annotations

import subprocess
import sys

import pytest

from opcast.models.estimators.xgboost_import import hidden

_LOADED = """
import sys
from opcast.models.estimators import xgboost_import
{first}
xgboost_import.xgboost()
import xgboost
from sklearn.linear_model import Ridge
print(xgboost.compat.SKLEARN_INSTALLED)
"""
_HEAVY = """
import sys
import opcast
opcast.latency("linear m=77 n=4096 k=4096 dtype=bf16", "h100-sxm")
print(*{"pandas", "pyarrow", "scipy", "sklearn", "xgboost", "jax"} & set(sys.modules))
"""
_PROGRAM = """
import sys
import opcast
text = "func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> "
text += "{ %y = stablehlo.add %x, %x : tensor<8xf32> return %y : tensor<8xf32> }"
opcast.predict(text, device="h100-sxm", lowering="fused")
print(*{"scipy", "sklearn", "jax"} & set(sys.modules))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "whole"), [("xgboost_import.own_process()", "False"), ("", "True")]
)
def test_a_user_keeps_xgboost_whole(first: str, whole: str) -> None:
    code = _LOADED.format(first=first)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [whole]


@pytest.mark.slow
def test_a_single_operator_needs_no_heavy_import() -> None:
    """Of a mixture of libraries, too, whose quantiles are SciPy's."""
    done = subprocess.run(
        [sys.executable, "-c", _HEAVY], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() in ([], ["scipy"])


def test_a_program_needs_neither_jax_nor_scipy() -> None:
    """Of StableHLO, which jaxlib parses; both take longer to import than a program to predict."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_a_hidden_package_comes_back() -> None:
    with hidden("wave"), pytest.raises(ImportError):
        import wave
    import wave

    with hidden("wave"):
        assert sys.modules["wave"] is wave
