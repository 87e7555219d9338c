"""Where MLflow is, as MLFLOW_TRACKING_URI names it."""

from pathlib import Path
from urllib.parse import urlsplit

from planners.errors import UserError

_SQLITE = "sqlite:///"


def require_trackable(uri: str) -> None:
    """Refuse an address that MLflow would refuse when the run has begun; whether a server answers is not asked.

    Raises:
        UserError: it is a directory, where MLflow 3 keeps no runs any more, or a database file in a missing one.
    """
    if urlsplit(uri).scheme in ("", "file") and not uri.startswith("databricks"):
        directory = uri.removeprefix("file://").rstrip("/") or "."
        raise UserError(
            f"MLFLOW_TRACKING_URI is {uri}, but MLflow keeps no runs in a directory any more: write "
            f"{_SQLITE}{Path(directory).absolute()}/mlflow.db, or name a server."
        )
    file = Path(uri.removeprefix(_SQLITE))
    if uri.startswith(_SQLITE) and not file.absolute().parent.is_dir():
        raise UserError(f"MLFLOW_TRACKING_URI is {uri}, but there is no directory {file.absolute().parent}: make it.")
