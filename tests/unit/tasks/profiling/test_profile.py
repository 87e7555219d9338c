"""Profiling: what is measured, on which device, and when it is measured again; the measurements themselves on fakes."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from planners.errors import UserError
from planners.hardware.machine import Device, Machine
from planners.hardware.profile import DeviceProfile
from planners.workload.step import Workload
from tasks.config.experiment import Experiment
from tasks.config.settings import Settings
from tasks.exchange.trajectories import Segment
from tasks.profiling import profile as profiling
from tasks.profiling.generation import LONGEST_ANSWER_TOKENS, measure_generation, measured_concurrency
from tasks.profiling.hardware import gemm_flops_per_s, memory_bytes_per_s
from tasks.profiling.profile import RunPart, profile_device, run_part
from tasks.rollout.engine import Answer, InFlight, Sampling
from tests.support.places import settings_of

MACHINE = Machine(
    name="host",
    devices=tuple(
        Device(index=index, device_type=name, kind="cpu", memory_bytes=2**30)
        for index, name in ((3, "slow"), (1, "fast"), (2, "slow"))
    ),
)


class FakePart:
    """Answers in place of the child processes, and remembers what it was asked."""

    def __init__(self, answer_tokens: float | None = 2.6) -> None:
        self.asked: list[tuple[str, int, Any]] = []
        self.answer_tokens = answer_tokens

    async def __call__(
        self, part: str, request: Mapping[str, Any], device: Device, settings: Settings
    ) -> dict[str, Any]:
        self.asked.append((part, device.index, request.get("answer_tokens")))
        if part == "generation":
            return {"tokens_per_s": {"8": 20.0, "64": 39.0}, "answer_tokens": self.answer_tokens, "swap_s": 0.5}
        return {
            "gemm_flops_per_s": 1e9,
            "memory_bytes_per_s": 1e9,
            "tokens_per_s": 60.0,
            "publish_s": 1.5,
            "verify_s": 0.25,
        }


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_of(home=tmp_path, runs=tmp_path / "runs", ledger_url="sqlite://")


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def measure(
    experiment: Experiment, device_type: str, model_path: Path, settings: Settings, part: RunPart
) -> DeviceProfile:
    return asyncio.run(profile_device(experiment, MACHINE, device_type, model_path, settings, part))


def test_one_device_is_measured_once(settings: Settings, model_path: Path) -> None:
    part = FakePart()
    first = measure(Experiment(), "slow", model_path, settings, part)
    assert part.asked == [("generation", 2, None), ("training", 2, 3)]
    assert first.generation_tokens_per_s == {8: 20.0, 64: 39.0}
    assert (first.training_tokens_per_s, first.publish_s, first.load_s) == (60.0, 1.5, 0.75)
    assert first.answer_tokens == 2.6
    assert measure(Experiment(), "slow", model_path, settings, part) == first
    assert len(part.asked) == 2


def test_answers_of_unknown_length_train_at_the_longest(settings: Settings, model_path: Path) -> None:
    part = FakePart(answer_tokens=None)
    assert measure(Experiment(), "fast", model_path, settings, part).answer_tokens is None
    assert part.asked == [("generation", 1, None), ("training", 1, 8)]


def test_what_a_measurement_depends_on_is_measured_anew(settings: Settings, model_path: Path) -> None:
    part = FakePart()

    def measured(experiment: Experiment, device_type: str = "slow") -> bool:
        before = len(part.asked)
        measure(experiment, device_type, model_path, settings, part)
        return len(part.asked) > before

    base = Experiment()
    assert measured(base)
    assert measured(base, "fast")
    assert measured(base.model_copy(update={"workload": Workload(group_size=4)}))
    (model_path / "config.json").write_text('{"layers": 2}')
    assert measured(base)
    # Neither the staleness bound nor the run's length changes a device's speed.
    assert not measured(base.model_copy(update={"workload": Workload(max_staleness=0)}))
    assert not measured(base.model_copy(update={"run": base.run.model_copy(update={"steps": 7})}))


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe", b'{"device_type": "slow"}'])
def test_a_corrupt_profile_is_measured_again(settings: Settings, model_path: Path, content: bytes) -> None:
    part = FakePart()
    first = measure(Experiment(), "slow", model_path, settings, part)
    (cached,) = (path for path in settings.shared.profiles.glob("slow-*.json") if not path.name.endswith(".key.json"))
    cached.write_bytes(content)
    assert measure(Experiment(), "slow", model_path, settings, part) == first
    assert len(part.asked) == 4
    assert json.loads(cached.read_bytes())["training_tokens_per_s"] == 60.0


def test_a_measurement_that_fails_leaves_nothing(settings: Settings, model_path: Path) -> None:
    settings.shared.profiles.mkdir(parents=True)
    request = {"experiment": {"run": {"name": "?"}}, "model_path": "x"}
    with pytest.raises(UserError, match=r"generation of fast failed with status 1 .*profile-fast-generation.*run.name"):
        asyncio.run(run_part("generation", request, MACHINE.devices[1], settings))
    assert list(settings.shared.profiles.iterdir()) == []


def test_a_measurement_that_hangs_is_ended(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.shared.profiles.mkdir(parents=True)
    monkeypatch.setattr(profiling, "PART_DEADLINE_S", 0.0)
    with pytest.raises(UserError, match="took over 0 s"):
        asyncio.run(run_part("generation", {}, MACHINE.devices[1], settings))


class FakeEngine:
    """Answers with as many tokens as the request allows, up to `length`, and records the traffic."""

    replica = "fake"
    loaded = (0, 0)

    def __init__(self, length: int) -> None:
        self.length = length
        self.in_flight: set[str] = set()
        self.batches: dict[str, int] = {}
        self.most = 0
        self.versions: list[tuple[int, int, Path]] = []

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> Answer:
        assert request_id not in self.in_flight
        self.in_flight.add(request_id)
        self.most = max(self.most, len(self.in_flight))
        batch = request_id.split("-")[1]
        self.batches[batch] = self.batches.get(batch, 0) + 1
        await asyncio.sleep(0.01)
        self.in_flight.discard(request_id)
        count = min(self.length, sampling.max_new_tokens)
        return Answer((Segment((7,) * count, (0.0,) * count, 0, self.replica),), "stop")

    async def abort(self, request_ids: Sequence[str]) -> None:
        raise AssertionError("nothing is aborted while measuring")

    async def load(self, lineage: int, number: int, path: Path, in_flight: InFlight) -> None:
        assert not self.in_flight
        self.versions.append((lineage, number, path))

    async def shutdown(self) -> None:
        raise AssertionError("the engine belongs to the caller")


def test_generation_is_measured_in_whole_groups_after_a_warm_up(tmp_path: Path) -> None:
    workload = Workload(prompts_per_step=4, group_size=2, max_new_tokens=8)
    engine = FakeEngine(length=3)
    rates = asyncio.run(measure_generation(engine, [[1, 2]] * 4, Sampling(1.0, 8, (0,), None), workload, tmp_path))
    assert engine.batches == {"0": 2, "1": 2, "2": 8}
    assert engine.most == 8
    assert list(rates.tokens_per_s) == [2, 8]
    assert rates.tokens_per_s[8] > rates.tokens_per_s[2] > 0
    assert rates.answer_tokens == 3.0
    assert engine.versions == [(0, 1, tmp_path)]


def test_long_answers_are_cut_and_their_length_unknown(tmp_path: Path) -> None:
    workload = Workload(prompts_per_step=1, group_size=2, max_new_tokens=10 * LONGEST_ANSWER_TOKENS)
    engine = FakeEngine(length=10**6)
    sampling = Sampling(1.0, workload.max_new_tokens, (0,), None)
    rates = asyncio.run(measure_generation(engine, [[1]], sampling, workload, tmp_path))
    assert rates.answer_tokens is None


@pytest.mark.parametrize(
    ("prompts", "group", "levels"),
    [(8, 8, [8, 64]), (1, 4, [4]), (512, 16, [16, 256]), (3, 1000, [1000])],
)
def test_measured_concurrency(prompts: int, group: int, levels: list[int]) -> None:
    assert measured_concurrency(Workload(prompts_per_step=prompts, group_size=group)) == levels


def test_made_up_groups_have_the_sizes_of_a_step() -> None:
    from tasks.profiling.training import MOST_TOKENS, made_up_groups

    groups = made_up_groups([[5, 6, 7]] * 3, Workload(group_size=4), 5)
    assert [group.trained_tokens for group in groups] == [20, 20, 20]
    assert groups[0].read().trajectories[0].token_ids.tolist() == [5, 6, 7, 5, 6]
    assert all(sum(group.advantages) == 0 and all(group.advantages) for group in groups)
    assert len(made_up_groups([[1]] * 9, Workload(group_size=4), MOST_TOKENS // 8)) == 2
    assert len(made_up_groups([[1]] * 9, Workload(group_size=4), MOST_TOKENS)) == 1


def test_hardware_rates_are_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.profiling.hardware.MEASURE_S", 0.01)
    cpu = torch.device("cpu")
    assert gemm_flops_per_s(cpu, torch.float32) > 1e6
    assert memory_bytes_per_s(cpu) > 1e6
