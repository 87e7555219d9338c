"""What must agree between the processes of one stack."""

from importlib.metadata import version

from tasks.exchange.wire import WIRE_VERSION

VARIABLE = "hexflow_versions"
"""The Prefect variable in which set-up records the versions a server works with."""


def local_versions() -> dict[str, str]:
    """The versions installed here that every machine of a stack must share."""
    return {"hexflow": version("hexflow"), "prefect": version("prefect"), "wire_schema": str(WIRE_VERSION)}


def differences(here: dict[str, str], there: dict[str, str]) -> list[str]:
    """One phrase for each entry that differs, such as `prefect is 3.7.7 here and 3.9.1 there`."""
    keys = sorted({*here, *there})
    return [
        f"{key} is {here.get(key, 'absent')} here and {there.get(key, 'absent')} there"
        for key in keys
        if here.get(key) != there.get(key)
    ]
