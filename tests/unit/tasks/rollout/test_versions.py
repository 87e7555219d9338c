"""Which version a replica takes: the newest that is whole; what is damaged is named once and left out."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, Ledger
from tasks.exchange.weights import publish_weights
from tasks.rollout.versions import VISIBLE_DEADLINE_S, WholeVersions
from tests.support.ledger import RUN, join


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.create()
    return run


@pytest.fixture
def publish(ledger: Ledger, run: RunDirectory) -> Callable[[int], Path]:
    trainer = join(ledger, "trainer")

    def fill(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(b"weights")

    def publish(number: int) -> Path:
        path = publish_weights(run, 0, number, fill)
        ledger.record_version(trainer, number, str(path))
        return path

    return publish


class Scene:
    """A replica that looks for weights."""

    def __init__(self, ledger: Ledger, run: RunDirectory) -> None:
        self.replica = join(ledger, "replica")
        self.said: list[str] = []
        self.now_s = 0.0
        self.versions = WholeVersions(ledger, self.replica, run, self.said.append, lambda: self.now_s)

    def newest(self, loaded: tuple[int, int] | None = None) -> tuple[int, int] | None:
        found = self.versions.claim_newest(loaded)
        return None if found is None else found[0]


@pytest.fixture
def scene(ledger: Ledger, run: RunDirectory) -> Scene:
    return Scene(ledger, run)


def damage(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.chmod(0o600)
    weights.write_bytes(b"weightz")


def test_the_newest_whole_version_is_taken_and_the_damaged_one_named_once(
    ledger: Ledger, publish: Callable[[int], Path], scene: Scene
) -> None:
    paths = [publish(number) for number in range(3)]
    damage(paths[2])
    assert scene.versions.claim_newest() == ((0, 1), paths[1])
    (line,) = scene.said
    assert line.startswith("version 2 of lineage 0 is damaged and left out: ")
    assert "model.safetensors" in line
    assert (0, 1) in ledger.claimed_versions(RUN)
    assert scene.newest(loaded=(0, 1)) is None
    publish(3)
    assert scene.newest(loaded=(0, 1)) == (0, 3)
    assert len(scene.said) == 1
    assert list(scene.versions.damaged.values()) == scene.said


def test_files_that_are_not_to_be_seen_yet_are_waited_for(publish: Callable[[int], Path], scene: Scene) -> None:
    """Shared storage shows them late; what is not there in the end is left out as well."""
    whole, late = publish(0), publish(1)
    hidden = late.rename(late.with_name("elsewhere"))
    assert scene.newest() is None
    scene.now_s = VISIBLE_DEADLINE_S
    assert scene.newest() is None
    hidden.rename(late)
    assert scene.newest() == (0, 1)
    late.rename(hidden)
    scene.now_s += 2 * VISIBLE_DEADLINE_S
    assert scene.versions.claim_newest() == ((0, 0), whole)
    assert scene.said == [f"version 1 of lineage 0 is damaged and left out: {late} is not there"]


def test_where_none_is_whole_there_is_none(publish: Callable[[int], Path], scene: Scene) -> None:
    for number in range(2):
        damage(publish(number))
    assert scene.newest() is None
    assert len(scene.said) == 2


def test_who_was_replaced_claims_nothing(
    ledger: Ledger, publish: Callable[[int], Path], scene: Scene, replica: Actor
) -> None:
    publish(0)
    with pytest.raises(Exception, match="replaced by attempt"):
        scene.newest()
