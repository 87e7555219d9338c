"""The installer says what the system lacks before it makes anything."""

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
TOOLS = ("bash", "dirname", "flock", "cat", "sha256sum", "cut")


@pytest.mark.parametrize(
    ("stack", "present", "packages"),
    [
        ("cpu", [], "g++ python3-dev libnuma1"),
        ("cpu", ["gcc"], "g++ python3-dev libnuma1"),
        ("cuda", [], "g++ python3-dev"),
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
    python.write_text('#!/bin/sh\ncase "$2" in *numa*) exit 1 ;; *sysconfig*) echo /no/headers ;; esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        [tools / "bash", tmp_path / "requirements" / "install.sh"],
        env={"PATH": str(tools), "HEXFLOW_INSTALL": stack},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.endswith(f"(Debian: apt-get install {packages}).\n")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / ".venv").exists()
