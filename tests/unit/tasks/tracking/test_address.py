"""Which addresses of MLflow are refused before a run begins."""

from pathlib import Path

import pytest

from planners.errors import UserError
from tasks.tracking.address import require_trackable


@pytest.mark.parametrize("uri", ["https://mlflow.example", "postgresql+psycopg://a:b@host/db", "databricks"])
def test_what_only_a_try_can_tell_is_let_through(uri: str) -> None:
    require_trackable(uri)


@pytest.mark.parametrize("uri", ["{}", "file://{}", "mlruns", "file:///gone/"])
def test_a_directory_is_refused_with_the_database_to_write_instead(tmp_path: Path, uri: str) -> None:
    named = uri.format(tmp_path)
    with pytest.raises(UserError, match=r"sqlite:///+\S+/mlflow\.db"):
        require_trackable(named)


def test_a_database_needs_its_directory(tmp_path: Path) -> None:
    require_trackable(f"sqlite:///{tmp_path}/mlflow.db")
    with pytest.raises(UserError, match="no directory"):
        require_trackable(f"sqlite:///{tmp_path}/missing/mlflow.db")
