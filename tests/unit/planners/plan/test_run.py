"""What the runtime reads of a plan: the trainer's share of each machine, and its actors without the predictions."""

import pytest

from planners.plan.run import MachineShare, RunPlan, StagePlan, TrainerPlan
from tests.support.plan import gpu_plan, run_plan


def share(machine: str, devices: int) -> MachineShare:
    return MachineShare(machine=machine, device_type="gpu", kind="cuda", devices=tuple(range(devices)))


def test_ranks_are_counted_through_the_trainers_machines() -> None:
    stage = StagePlan(machines=(share("a", 2), share("b", 3)), data=5, tensor=1, layer_share=1.0)
    trainer = TrainerPlan(layout="gpu dp5", stages=(stage,), zero_stage=2, micro_batch_tokens=1024)
    assert [trainer.share_of(part.machine) for part in trainer.machines] == [(share("a", 2), 0), (share("b", 3), 2)]
    assert (trainer.ranks, stage.devices) == (5, 5)
    with pytest.raises(LookupError, match="no devices on machine c"):
        trainer.share_of("c")


def test_cores_of_a_machine_are_one_rank() -> None:
    cores = MachineShare(machine="a", device_type="cpu", kind="cpu", devices=(1, 3, 5))
    assert cores.ranks == run_plan().trainer.ranks == 1


def test_a_stored_plan_is_read_by_its_actors_without_what_it_predicts() -> None:
    plan = gpu_plan("here", "gpu", 3)
    read = RunPlan.model_validate_json(plan.model_dump_json())
    assert (read.trainer, read.replicas) == (plan.trainer, plan.replicas)
    assert [replica.slot for replica in read.replicas] == [0, 1]
    assert set(RunPlan.model_fields) == set(read.model_dump())
