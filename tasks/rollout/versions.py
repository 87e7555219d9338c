"""Which policy version a replica takes: the newest that is whole; a damaged one is named once and left out."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, Ledger
from tasks.exchange.weights import WeightsCorrupt, verify_weights

VISIBLE_DEADLINE_S = 30.0
"""Longest time until what was recorded is to be seen on shared storage."""
Version = tuple[int, int]
_log = logging.getLogger(__name__)


class WholeVersions:
    """Looks for versions to load; remembers what is damaged, so that it is read and named once."""

    def __init__(
        self,
        ledger: Ledger,
        actor: Actor,
        run: RunDirectory,
        tell: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` hears of each damaged version; `clock` is what waiting for files is measured by."""
        self._ledger = ledger
        self._actor = actor
        self._run = run
        self._tell = tell
        self._clock = clock
        self._missed: dict[Version, float] = {}
        self.damaged: dict[Version, str] = {}
        """What is said of each damaged version."""

    def claim_newest(self, loaded: Version | None = None) -> tuple[Version, Path] | None:
        """The newest whole live version, claimed, and its directory; None where that is `loaded`, or to be waited for.

        Raises:
            Fenced: this attempt is no longer current.
        """
        for version in self._ledger.live_versions(self._actor.run_id):
            if version == loaded:
                return None
            if version in self.damaged:
                continue
            path = self._run.weights_path(*version)
            if not path.exists():
                if self._clock() - self._missed.setdefault(version, self._clock()) <= VISIBLE_DEADLINE_S:
                    return None
                self._leave_out(version, f"{path} is not there")
            elif not self._ledger.claim_version(self._actor, *version):
                return None  # superseded before the claim: the next look finds another
            else:
                try:
                    verify_weights(path)
                except WeightsCorrupt as error:
                    self._leave_out(version, str(error))
                else:
                    return version, path
        return None

    def _leave_out(self, version: Version, why: str) -> None:
        damage = f"version {version[1]} of lineage {version[0]} is damaged and left out: {why}"
        self.damaged[version] = damage
        _log.error("%s", damage)
        self._tell(damage)
