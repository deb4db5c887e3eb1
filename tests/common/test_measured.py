"""What is measured is a positive, finite number, or an empty cell."""

import pandas as pd
import pytest

from opcast.common.errors import DatasetError
from opcast.common.parquet import check_measured


@pytest.mark.parametrize("wrong", [-7.6, 0, "inf", "abc", float("-inf")])
def test_what_is_no_measurement_is_refused_by_table_row_and_column(wrong: object) -> None:
    table = pd.DataFrame({"id": ["a", "b", "c"], "step_s": [1.5, wrong, wrong]})
    with pytest.raises(DatasetError) as refused:
        check_measured(table, ["block_s", "step_s"], "runs.csv")
    said = str(refused.value)
    assert said.startswith(f"runs.csv: row b: step_s is {table['step_s'][1]}, and 1 more")
    assert "leave the cell empty" in said


def test_empty_cells_are_no_measurement_unless_one_is_needed() -> None:
    table = pd.DataFrame({"us": [1.0, None, " "]}, dtype=object)
    check_measured(table, ["us"], "runs.csv")
    with pytest.raises(DatasetError, match=r"runs.csv: row 1: us is nothing, and 1 more"):
        check_measured(table, ["us"], "runs.csv", needed=True)


def test_rows_may_be_named_by_another_column() -> None:
    table = pd.DataFrame({"question": ["a"], "measured": ["-1700"]})
    with pytest.raises(DatasetError, match=r"m\.csv: question a: measured is -1700,"):
        check_measured(table, ["measured"], "m.csv", row="question")
