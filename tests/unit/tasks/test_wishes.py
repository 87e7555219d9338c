"""What an experiment wishes of the devices is kept to, or refused in the words of its keys."""

from typing import Any, Literal

import pytest

from planners.errors import UserError
from planners.hardware.machine import Device, Machine
from tasks.config.experiment import Experiment
from tasks.wishes import demand_for, usable_devices

Counts = dict[tuple[str, Literal["cuda", "cpu"]], int]


def machine_of(counts: Counts) -> Machine:
    devices = [
        Device(index=2 * index + 1, device_type=name, kind=kind, memory_bytes=2**36)
        for (name, kind), count in counts.items()
        for index in range(count)
    ]
    return Machine(name="host", devices=tuple(devices))


def wishing(device_types: list[str] | None = None, **planner: object) -> Experiment:
    return Experiment.model_validate({"cluster": {"device_types": device_types}, "planner": planner})


def test_only_devices_that_may_be_used_are_left() -> None:
    machine = machine_of({("a", "cuda"): 2, ("b", "cuda"): 2})
    assert usable_devices(wishing(), machine) == machine
    assert usable_devices(wishing(["b"], train_devices=1), machine).count_by_type() == {"b": 2}


@pytest.mark.parametrize(
    ("counts", "wishes", "message"),
    [
        ({("cpu", "cpu"): 1}, {}, "needs at least 2 devices.*found 1.*cpu 1.*HEXFLOW_DEVICES"),
        ({("cpu", "cpu"): 2}, {"device_types": ["cpus"]}, "cluster.device_types.*'cpus'.*did you mean 'cpu'"),
        ({("cpu", "cpu"): 2}, {"train_type": "h100"}, "planner.train_type.*'h100'.*found: cpu"),
        ({("cpu", "cpu"): 2}, {"train_devices": 2}, "planner.train_devices is 2.*between 1 and 1"),
        ({("cpu", "cpu"): 1, ("gpu", "cuda"): 1}, {"device_types": ["cpu"]}, "found 1"),
    ],
)
def test_what_a_person_gets_wrong_is_said(counts: Counts, wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        usable_devices(wishing(**wishes), machine_of(counts))


def test_a_plan_counts_the_reference_model_where_the_algorithm_refers_to_it() -> None:
    for coefficient, refers in ((0.0, False), (0.1, True)):
        experiment = Experiment.model_validate({"algorithm": {"kind": "cispo", "kl_coefficient": coefficient}})
        assert demand_for(experiment, 1024).reference is refers
