"""Which of this machine's interfaces libraries of collectives use: left alone, each would choose one itself."""

import psutil

LOOPBACK = "127.0.0.1"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which gloo and NCCL are told the interface on which they listen."""


def talking_on(address: str) -> dict[str, str]:
    """Variables of processes that are to talk on the interface that has an address of this machine."""
    named = {part.address.partition("%")[0]: name for name, parts in psutil.net_if_addrs().items() for part in parts}
    return dict.fromkeys(INTERFACES, named[address])
