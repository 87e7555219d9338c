"""A person's own reward function: kept with the run, checked before any work, imported by scoring processes alone."""

import hashlib
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from planners.errors import UserError
from tasks.config.paths import FUNCTION
from tasks.config.rewards import PythonReward, Reward
from tasks.exchange.files import write_atomic
from tasks.rewards.base import Score, from_line
from tasks.rewards.process import scoring_environment, worker_command

CHECK_DEADLINE_S = 60.0
"""Longest import of a person's file, with what it imports in turn."""


def keep_functions(rewards: Sequence[Reward], directory: Path) -> list[Reward]:
    """The rewards with each function's file copied into `directory`, and its copy's checksum noted.

    So a run and its resumes score as it was started, whatever becomes of the file.

    Raises:
        UserError: a file is gone.
    """
    kept: list[Reward] = []
    for reward in rewards:
        if isinstance(reward, PythonReward):
            _, name = _file_of(reward)
            source = _read(reward)
            checksum = hashlib.sha256(source).hexdigest()
            copy = directory / f"{reward.label}-{checksum[:12]}.py"
            directory.mkdir(parents=True, exist_ok=True)
            write_atomic(copy, source)
            reward = reward.model_copy(update={"function": f"{copy}:{name}", "name": reward.label, "sha256": checksum})
        kept.append(reward)
    return kept


def check_functions(rewards: Sequence[Reward]) -> None:
    """Refuse functions that cannot be imported or take other arguments.

    They are imported in a process that is killed after `CHECK_DEADLINE_S`: importing runs what is in the file.

    Raises:
        UserError: says which, and why.
    """
    own = [reward for reward in rewards if isinstance(reward, PythonReward)]
    for reward in own:
        _read(reward)
    if not own:
        return
    process = subprocess.Popen(
        worker_command(own, []),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=scoring_environment(),
        start_new_session=True,
    )
    try:
        answer, _ = process.communicate(timeout=CHECK_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"Importing {' and '.join(reward.function for reward in own)} took over {CHECK_DEADLINE_S:.0f} s and was "
            "ended: what takes long belongs into the function, or into no reward."
        ) from None
    finally:
        _kill(process)
    reply = from_line(answer.splitlines()[0]) if answer else {"error": "the process that imported it died"}
    if "error" in reply:
        raise UserError(f"A reward cannot be used: {reply['error']}.")


_RETURN_NO_NUMBER = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def open_function(reward: PythonReward) -> Score:
    """The function, its file imported here and now. Called in scoring processes only.

    Raises:
        UserError: the file is not what the run was started with, cannot be imported, or has no function that can be
            called with prompt, answer and item.
    """
    path, name = _file_of(reward)
    source = _read(reward)
    if reward.sha256 is not None and hashlib.sha256(source).hexdigest() != reward.sha256:
        raise UserError(f"{path} is not the file that the run was started with: its checksum is another")
    spec = importlib.util.spec_from_file_location(f"hexflow_reward_{reward.label}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and others look there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a person's file raises is told to that person
        raise UserError(f"{path} cannot be imported ({type(error).__name__}: {error})") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{path} has no function {name}: define one there, or name another in `function`")
    if any(is_one(function) for is_one in _RETURN_NO_NUMBER):
        raise UserError(f"{name} in {path} is a coroutine or a generator: write a plain function that returns a number")
    try:
        inspect.signature(function).bind("prompt", "answer", {})
    except TypeError as error:
        raise UserError(
            f"{name} in {path} is called with prompt, answer and item, and takes other arguments ({error})"
        ) from None
    found: Score = function
    return found


def _file_of(reward: PythonReward) -> tuple[Path, str]:
    match = FUNCTION.fullmatch(reward.function)
    assert match is not None  # checked by the section
    return Path(match["file"]), match["name"]


def _read(reward: PythonReward) -> bytes:
    path, _ = _file_of(reward)
    if not path.is_absolute():  # from a file or the command line it comes absolute
        raise UserError(f"The function {reward.function} of a reward is relative: give the absolute path.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path}, which the function of the reward {reward.label} names, cannot be read ({error.strerror}): it "
            "must lie beside the experiment file."
        ) from None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process with all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()
