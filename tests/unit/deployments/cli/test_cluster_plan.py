"""`hexflow plan --cluster` and `hexflow simulate`: what they print and write, and how they refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import DEPLOYMENTS

SMALL = str(DEPLOYMENTS / "experiments" / "r1-distill-qwen-1.5b.yaml")
MODEL = f"model.source={DEPLOYMENTS / 'models' / 'r1-distill-qwen-1.5b'}"
CLUSTER = str(DEPLOYMENTS / "clusters" / "paper-h800-8-h20-16.yaml")
KEYS = [
    "mode",
    "throughput_tokens_per_s",
    "step_s",
    "rollout_s",
    "train_s",
    "sync_s",
    "reward_s",
    "usd_per_h",
    "upper_bound_tokens_per_s",
    "gap",
    "solve_s",
    "trainer",
    "replicas",
    "machines",
    "memory",
]


def hexflow(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "deployments", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        # No such server answers, so that no stack starts even if a check is broken.
        env={
            "PYTHONPATH": str(DEPLOYMENTS.parent),
            "HEXFLOW_HOME": str(tmp_path / "home"),
            "PATH": "",
            "PREFECT_API_URL": "http://127.0.0.1:1/api",
        },
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_plan_is_explained_written_and_simulated(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    status, output = hexflow(tmp_path, "plan", SMALL, MODEL, "--cluster", CLUSTER, "--json", str(plan))
    assert status == 0, output
    assert "limits:" in output
    assert "below the best there is" in output
    written = json.loads(plan.read_text())
    assert set(KEYS) <= written.keys()
    assert written["upper_bound_tokens_per_s"] >= written["throughput_tokens_per_s"] > 0
    assert written["explanation"].splitlines()[0] in output

    outcome = tmp_path / "simulation.json"
    status, output = hexflow(tmp_path, "simulate", str(plan), "--steps", "12", "--json", str(outcome))
    assert status == 0, output
    assert "trainer" in output
    simulated = json.loads(outcome.read_text())
    assert max(map(int, simulated["staleness"])) <= 8
    assert simulated["dropped"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "absent.yaml"], "absent.yaml"),
        (["--cluster", CLUSTER, "--budget", "-1"], "budget"),
        (["--cluster", CLUSTER, "--target", "1e9"], "cannot be reached"),
        (["--budget", "10"], "name one with --cluster"),
        (["--mode", "fast"], "for '--mode': 'fast' is not one of joint, two-phase, "),
        (["--mode", "exhaustive"], "name one with --cluster"),
        (["--sync", "tree"], "name one with --cluster"),
        (["--what-if"], "name one with --cluster"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    status, output = hexflow(tmp_path, "plan", SMALL, MODEL, *arguments)
    assert status == 2
    assert message in output
    assert "Traceback" not in output


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    status, output = hexflow(tmp_path, "simulate", "plan.json")
    assert status == 2
    assert "plan.json" in output
    assert "Traceback" not in output
