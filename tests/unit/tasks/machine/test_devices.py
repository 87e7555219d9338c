"""A device serves one holder at a time, and a holder's death frees it."""

import subprocess
import sys
from pathlib import Path

import pytest

from planners.errors import UserError
from tasks.config.settings import Settings
from tasks.machine.devices import describe_holder, hold_devices

HOLD_AND_WAIT = """
import sys, time
from tasks.machine.devices import hold_devices
from tasks.config.settings import load_settings
with hold_devices("cpu", [0, 1], "run a, replica 0", load_settings()):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_held_device_names_its_holder_and_death_frees_it(settings: Settings) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD_AND_WAIT], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match="Core 1 is held by run a, replica 0"),
            hold_devices("cpu", [1], "run b", settings, deadline_s=0.1),
        ):
            raise AssertionError("two holders")
        with hold_devices("cpu", [2], "run b", settings, deadline_s=0.1):
            pass
        assert describe_holder("cpu", 2, settings) is None
        said = describe_holder("cpu", 0, settings)
        assert said == "Core 0 is held by run a, replica 0: wait until it has ended, or cancel it."
        holder.kill()
        holder.wait()
    with hold_devices("cpu", [0, 1], "run b", settings, deadline_s=5.0):
        assert (Path(settings.local.home) / "devices" / "cpu-0").read_text() == "run b\n"
