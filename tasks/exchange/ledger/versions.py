"""The ledger's policy versions: which exist, which a replica is about to read, which may be deleted.

A version is live until it is retired (its files may go) or abandoned (a resume went back behind it). Retiring and
claiming are transactions on the same rows, so the files that a claim names are not deleted under the reader. What is
gone from storage is not asked about again: the caller names what it found there.
"""

from collections.abc import Collection

from sqlalchemy import Connection, Select, delete, func, insert, select, update

from tasks.exchange.ledger.database import Database, now_s
from tasks.exchange.ledger.fence import require_active, rows_of, run_of
from tasks.exchange.ledger.rows import Actor
from tasks.exchange.ledger.schema import actors, is_live, policy_versions, weight_claims


class Weights(Database):
    """Policy versions, their readers and their end."""

    def record_version(self, actor: Actor, number: int, path: str) -> None:
        """Announce the version (current lineage, number), whose files lie whole under `path`. Safe to repeat.

        Raises:
            Fenced: this trainer is no longer current.
        """
        with self.write(actor.run_id) as connection:
            require_active(connection, actor)
            lineage = run_of(connection, actor.run_id).lineage
            if _state_of(connection, actor.run_id, lineage, number) is None:
                values = {"run_id": actor.run_id, "lineage": lineage, "number": number, "state": "live"}
                connection.execute(insert(policy_versions).values(**values, path=str(path), created_s=now_s()))

    def lineage_of(self, actor: Actor) -> int:
        """The lineage that a trainer works in, for as long as it is current: a resume fences it.

        Raises:
            Fenced: this trainer is no longer current.
        """
        with self.read() as connection:
            require_active(connection, actor)
            return run_of(connection, actor.run_id).lineage

    def has_version(self, run_id: str, lineage: int, number: int) -> bool:
        """Whether this version was ever recorded."""
        with self.read() as connection:
            return _state_of(connection, run_id, lineage, number) is not None

    def latest_version(self, run_id: str) -> tuple[int, int] | None:
        """(lineage, number) of the newest live version, or None before there is one."""
        with self.read() as connection:
            return newest_live_version(connection, run_id)

    def live_versions(self, run_id: str) -> list[tuple[int, int]]:
        """(lineage, number) of every live version, the newest first: as many as retention keeps and readers claim."""
        with self.read() as connection:
            return _live_versions(connection, run_id)

    def claim_version(self, actor: Actor, lineage: int, number: int) -> bool:
        """Say that the actor is about to read a version, so that its files stay.

        Returns:
            False if the version has been retired or abandoned meanwhile: ask for the latest again.

        Raises:
            Fenced: this attempt is no longer current.
        """
        with self.write(actor.run_id) as connection:
            require_active(connection, actor)
            if _state_of(connection, actor.run_id, lineage, number) != "live":
                return False
            _claim(connection, actor, lineage, number)
            return True

    def set_loaded(self, actor: Actor, lineage: int, number: int) -> None:
        """Say that the actor now generates with a version; its claims of other versions are released.

        Raises:
            Fenced: this attempt is no longer current.
            ValueError: the version was never recorded.
        """
        with self.write(actor.run_id) as connection:
            require_active(connection, actor)
            if _state_of(connection, actor.run_id, lineage, number) is None:
                raise ValueError(
                    f"{actor.role} {actor.slot} loaded version {lineage, number}, which was never recorded"
                )
            connection.execute(delete(weight_claims).where(*rows_of(actor, weight_claims)))
            _claim(connection, actor, lineage, number)
            values = {"loaded_lineage": lineage, "loaded_number": number}
            connection.execute(update(actors).where(*rows_of(actor, actors)).values(**values))

    def claimed_versions(self, run_id: str) -> set[tuple[int, int]]:
        """The (lineage, number) of every version that an actor reads or generates with."""
        with self.read() as connection:
            return _claimed(connection, run_id)

    def retire_versions(
        self, actor: Actor, keep_newest: int, found: Collection[tuple[int, int]]
    ) -> set[tuple[int, int]]:
        """Retire all live versions except the newest `keep_newest` and the claimed ones.

        Args:
            actor: the trainer.
            keep_newest: at least 1.
            found: (lineage, number) of the versions whose files are on storage, see `weights.found_versions`.

        Returns:
            Those of `found` that nobody claims and that are retired, abandoned, or of a lineage that is over and
            never recorded, for `weights.delete_unused`: nobody can claim them any more, so their files may go however
            late the caller deletes them.

        Raises:
            Fenced: this trainer is no longer current.
        """
        if keep_newest < 1:
            raise ValueError("the newest version is always kept: replicas are about to load it")
        with self.write(actor.run_id) as connection:
            require_active(connection, actor)
            claimed = _claimed(connection, actor.run_id)
            for lineage, number in set(_live_versions(connection, actor.run_id)[keep_newest:]) - claimed:
                connection.execute(
                    update(policy_versions)
                    .where(
                        policy_versions.c.run_id == actor.run_id,
                        policy_versions.c.lineage == lineage,
                        policy_versions.c.number == number,
                    )
                    .values(state="retired")
                )
            present = run_of(connection, actor.run_id).lineage
            states = {version: _state_of(connection, actor.run_id, *version) for version in set(found) - claimed}
            over = {version for version, state in states.items() if state is None and version[0] < present}
            return over | {version for version, state in states.items() if state in ("retired", "abandoned")}


def newest_live_version(connection: Connection, run_id: str) -> tuple[int, int] | None:
    """(lineage, number) of the newest live version, or None before there is one."""
    newest = connection.execute(_live(run_id).limit(1)).one_or_none()
    return None if newest is None else (newest.lineage, newest.number)


def usable_version(connection: Connection, actor: Actor, said: int) -> int | None:
    """The version number that a replica's next tokens are at least as new as.

    None if its policy was abandoned, or it is not to begin anything new any more.

    Args:
        connection: a writing transaction.
        actor: the replica.
        said: the number it says it has loaded. It may lag or lead what `set_loaded` recorded by the load under way, and
            the older one is the safe one. A replica that recorded nothing has the prepared model, which is version 0.
    """
    # Claim by claim: as a join, a planner may begin with all versions there are.
    versions, claims = policy_versions.c, weight_claims.c
    this = (versions.run_id == claims.run_id, versions.lineage == claims.lineage, versions.number == claims.number)
    state = select(versions.state).where(*this).scalar_subquery()
    abandoned = select(claims.number).where(*rows_of(actor, weight_claims), state == "abandoned")
    query = select(actors.c.loaded_number, actors.c.wanted, abandoned.exists()).where(*rows_of(actor, actors))
    loaded, wanted, is_abandoned = connection.execute(query).one()
    return None if is_abandoned or wanted != "run" else min(said, loaded or 0)


def newest_possible_version(connection: Connection, actor: Actor) -> int:
    """The newest version number that a token of this replica can have: claims come before loads and outlive them."""
    newest = connection.scalar(select(func.max(weight_claims.c.number)).where(*rows_of(actor, weight_claims)))
    return newest or 0


def _live(run_id: str) -> Select[tuple[int, int]]:
    """The live versions, newest first: as many as retention keeps and readers claim."""
    return (
        select(policy_versions.c.lineage, policy_versions.c.number)
        .where(policy_versions.c.run_id == run_id, is_live)
        .order_by(policy_versions.c.number.desc(), policy_versions.c.lineage.desc())
    )


def _live_versions(connection: Connection, run_id: str) -> list[tuple[int, int]]:
    return [(row.lineage, row.number) for row in connection.execute(_live(run_id))]


def _state_of(connection: Connection, run_id: str, lineage: int, number: int) -> str | None:
    return connection.scalar(
        select(policy_versions.c.state).where(
            policy_versions.c.run_id == run_id,
            policy_versions.c.lineage == lineage,
            policy_versions.c.number == number,
        )
    )


def _claimed(connection: Connection, run_id: str) -> set[tuple[int, int]]:
    query = select(weight_claims.c.lineage, weight_claims.c.number).where(weight_claims.c.run_id == run_id)
    return {(row.lineage, row.number) for row in connection.execute(query)}


def _claim(connection: Connection, actor: Actor, lineage: int, number: int) -> None:
    this = [*rows_of(actor, weight_claims), weight_claims.c.lineage == lineage, weight_claims.c.number == number]
    if connection.execute(select(weight_claims.c.number).where(*this)).one_or_none() is None:
        keys = {"run_id": actor.run_id, "role": actor.role, "slot": actor.slot, "attempt": actor.attempt}
        connection.execute(insert(weight_claims).values(**keys, lineage=lineage, number=number))
