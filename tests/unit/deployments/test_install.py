"""The installer says what the system lacks before it makes anything."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.places import REPOSITORY

TOOLS = ("bash", "dirname", "flock", "cat", "sha256sum", "cut", "rm")


def run_make(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=directory, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A place with the Makefile, and an installer that says that it ran."""
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    (tmp_path / "requirements").mkdir()
    installer = tmp_path / "requirements" / "install.sh"
    installer.write_text("#!/bin/sh\necho installing\n")
    installer.chmod(0o755)
    return tmp_path


def test_a_missing_experiment_is_told_before_set_up(tree: Path) -> None:
    done = run_make(tree, "-j", "train", "EXPERIMENT=nope.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("hexflow: There is no experiment file nope.yaml; ")
    assert "installing" not in done.stdout
    (tree / "my experiment.yaml").write_text("run: {steps: 1}\n")
    assert "installing" in run_make(tree, "train", "EXPERIMENT=my experiment.yaml").stdout


def run_installer(directory: Path, tools: Path, stack: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tools / "bash", directory / "requirements" / "install.sh"],
        env={"PATH": str(tools), "HEXFLOW_INSTALL": stack},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("stack", "present", "packages"),
    [
        ("cpu", [], "python3-venv g++ python3-dev libnuma1"),
        ("cpu", ["gcc"], "python3-venv g++ python3-dev libnuma1"),
        ("cuda", [], "python3-venv g++ python3-dev"),
    ],
)
def test_system_packages_that_are_missing_are_named_together(
    tmp_path: Path, stack: str, present: list[str], packages: str
) -> None:
    shutil.copytree(REPOSITORY / "requirements", tmp_path / "requirements")
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(str(shutil.which(name)))
    for name in present:
        (tools / name).symlink_to("/bin/true")
    python = tools / "python3.11"
    python.write_text('#!/bin/sh\ncase "$2" in *numa* | *ensurepip*) exit 1 ;; *sysconfig*) echo /no/headers ;; esac\n')
    python.chmod(0o755)
    done = run_installer(tmp_path, tools, stack)
    assert done.returncode == 2
    assert done.stderr.endswith(f"(Debian: apt-get install {packages}).\n")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / ".venv").exists()
    assert done.stdout == ""


def test_an_environment_whose_python_is_gone_is_made_anew(tmp_path: Path) -> None:
    """Else set-up would call it complete, and the command would not start."""
    shutil.copytree(REPOSITORY / "requirements", tmp_path / "requirements")
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(str(shutil.which(name)))
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/no/such/python")
    (tmp_path / ".venv" / "hexflow-installed").write_text("cpu here 0123\n")
    done = run_installer(tmp_path, tools, "cpu")
    assert "the Python of .venv is gone, making a new one" in done.stdout
    assert done.returncode == 2, "there is no Python among the tools"
    assert not (tmp_path / ".venv").exists()
