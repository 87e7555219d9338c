"""Devices as the planner sees them."""

import os
from pathlib import Path

import pytest

from planners.errors import UserError
from tasks.config.settings import load_settings
from tasks.machine.discovery import discover_machine, parse_device_labels


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEXFLOW_DEVICES", "HEXFLOW_MACHINE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_each_core_is_a_device_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine = discover_machine()
    cores = os.sched_getaffinity(0)
    assert {d.index for d in machine.devices} == cores
    assert machine.count_by_type() == {"cpu": len(cores)}
    assert {d.kind for d in machine.devices} == {"cpu"}
    assert machine.devices[0].memory_bytes * len(cores) > 2**30


def test_labelled_cores_form_two_types(monkeypatch: pytest.MonkeyPatch) -> None:
    core = min(os.sched_getaffinity(0))
    monkeypatch.setenv("HEXFLOW_DEVICES", f"slow={core}")
    assert discover_machine().count_by_type() == {"slow": 1}
    assert parse_device_labels("fast=0; slow=1,2", [0, 1, 2]) == {0: "fast", 1: "slow", 2: "slow"}


@pytest.mark.parametrize("text", ["fast", "fast=", "=0", "Fast=0", "fast=a", "fast=0,", "fast=9", "fast=0;slow=0", ";"])
def test_bad_labels(text: str) -> None:
    with pytest.raises(UserError, match="HEXFLOW_DEVICES"):
        parse_device_labels(text, [0, 1])


def test_no_type_takes_the_name_of_the_control_pool() -> None:
    with pytest.raises(UserError, match=r"'control=0'.* another name"):
        parse_device_labels("control=0;slow=1", [0, 1])


def test_machine_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXFLOW_MACHINE", "Node 7.cluster")
    assert discover_machine().name == "node-7-cluster"


def test_settings_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEXFLOW_HOME", "HEXFLOW_RUNS", "HEXFLOW_LEDGER_URL"):
        monkeypatch.delenv(name, raising=False)
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert load_settings().local.home == inner / ".hexflow"
    (tmp_path / ".hexflow").mkdir()
    found = load_settings()
    assert found.local.home == tmp_path / ".hexflow"
    assert found.shared.runs == tmp_path / "runs"
    assert found.shared.ledger_url == f"sqlite:///{tmp_path}/.hexflow/ledger.db"


def test_settings_survive_into_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEXFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HEXFLOW_RUNS", str(tmp_path / "elsewhere"))
    settings = load_settings()
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir("/")
    assert load_settings() == settings
