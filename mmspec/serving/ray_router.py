"""Session-affine request router of Ray Serve."""

from __future__ import annotations

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica


class SessionRouter(ConsistentHashRouter):
    """Ray's consistent hashing of session ids; requests without one go to the replica with the shortest queue.

    Ray's own router hashes random ids of requests without a session, so one replica may be busy while another is idle.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas to try, best first; Ray picks the shortest queue within a group."""
        ranked = await super().choose_replicas(candidate_replicas, pending_request)
        in_session = pending_request is not None and pending_request.metadata.session_id
        return ranked if in_session else [candidate_replicas]
