"""Trackers of other packages: no account, no network, nothing outside of the tests' own folders."""

from __future__ import annotations

import os

import pytest

QUIET = {
    "DO_NOT_TRACK": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", "COMET_ERROR_TRACKING_ENABLE": "false",
    "COMET_DISABLE_AUTO_LOGGING": "1", "COMET_LOGGING_CONSOLE": "ERROR", "DVC_NO_ANALYTICS": "1",
    "MPLBACKEND": "Agg",
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def quiet(tmp_path_factory):
    """Variables that the packages read when they are imported; children inherit them."""
    place = tmp_path_factory.mktemp("trackers")
    folders = {"TRACKIO_DIR": "trackio", "WANDB_DATA_DIR": "wandb-data", "WANDB_CACHE_DIR": "wandb-cache"}
    os.environ.update(QUIET | {name: str(place / folder) for name, folder in folders.items()})
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_DIR"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def database(tmp_path_factory):
    """An empty MLflow database: it takes seconds to make, and tests copy it."""
    import mlflow

    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path
