"""What the gate before the stack's servers costs a request, side by side: each server with it and without.

Run as `python -m benchmarks.gate`; starts four servers in a directory of its own and ends them. Requests alternate
between the two, so that other work on the machine meets both.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from deployments.local import servers
from deployments.local.secret import make_secret
from deployments.web import answers, basic
from tasks.config.settings import MachinePlaces, Settings, SharedPlaces
from tasks.machine.processes import ProcessGroup

REQUESTS = 400
START_DEADLINE_S = 300.0
ASKED: dict[str, list[tuple[str, str, dict[str, object] | None]]] = {
    servers.PREFECT: [
        ("GET", "/api/admin/version", None),
        ("POST", "/api/flow_runs/filter", {"limit": 10}),
    ],
    servers.MLFLOW: [
        ("GET", "/version", None),
        ("POST", "/api/2.0/mlflow/runs/search", {"experiment_ids": ["0"], "max_results": 10}),
    ],
}
HEALTH = {servers.PREFECT: "/api/health", servers.MLFLOW: "/health"}


def start(name: str, home: Path, has_gate: bool) -> tuple[ProcessGroup, str, str]:
    """One server: its processes, address and Authorization header."""
    settings = Settings(SharedPlaces(home / "runs", f"sqlite:///{home}/ledger.db"), MachinePlaces(home))
    home.mkdir()
    port, pair = servers.choose_port(0), make_secret(settings)
    url = f"http://{servers.HOST}:{port}"
    argv = servers.prefect_server_argv(port) if name == servers.PREFECT else servers.mlflow_server_argv(settings, port)
    env = servers.environment(settings, f"{url}/api", url)
    if has_gate:
        env |= servers.prefect_server_environment(pair, f"{url}/api")
    else:
        argv = [
            part.replace("deployments.local.gate:prefect_app", "prefect.server.api.server:create_app") for part in argv
        ]
        argv = [part for part in argv if part not in ("--app-name", "hexflow")]
    return ProcessGroup.start(argv, env, home / "log"), url, basic(pair)


def measure(name: str, place: Path) -> None:
    """Print the medians of both, and what the gate adds."""
    started = [start(name, place / f"{name}-{has_gate}", has_gate) for has_gate in (True, False)]
    try:
        give_up = time.monotonic() + START_DEADLINE_S
        while not all(answers(url + HEALTH[name]) for _, url, _ in started):
            if time.monotonic() > give_up:
                sys.exit(f"{name} did not start: {started[0][0].tail()}{started[1][0].tail()}")
            time.sleep(0.5)
        with httpx.Client(trust_env=False, timeout=30) as client:
            for method, path, body in ASKED[name]:
                taken_s: list[list[float]] = [[], []]
                for _ in range(REQUESTS):
                    for (_, url, key), times in zip(started, taken_s, strict=True):
                        began = time.perf_counter()
                        client.request(method, url + path, json=body, headers={"Authorization": key}).raise_for_status()
                        times.append(time.perf_counter() - began)
                gate_ms, plain_ms = (1000 * statistics.median(times) for times in taken_s)
                added = f"{gate_ms - plain_ms:+.2f} ms"
                print(f"{name:<8} {method:<4} {path:<30} {gate_ms:6.2f} ms with, {plain_ms:6.2f} ms without: {added}")
    finally:
        for group, _, _ in started:
            group.stop()


def main() -> None:
    """Both servers, one after the other."""
    with tempfile.TemporaryDirectory(prefix="hexflow-gate-") as place:
        for name in ASKED:
            measure(name, Path(place))


if __name__ == "__main__":
    main()
