"""Request router of Ray Serve: requests of a session go to the same replica."""

from __future__ import annotations

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica


class SessionRouter(ConsistentHashRouter):
    """Ray's consistent hashing of session ids; requests without one go to the replica with the shortest queue.

    Ray's own router hashes the latter's random ids, so that one replica may be busy while another is idle.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas to try, best first; Ray takes the one with the shortest queue of each group."""
        ranked = await super().choose_replicas(candidate_replicas, pending_request)
        in_session = pending_request is not None and pending_request.metadata.session_id
        return ranked if in_session else [candidate_replicas]
