"""How Ray Serve chooses among replicas, and how many there shall be.

Ray's controller and proxies load these by value: nothing here may need the rest of the package.
"""

import hashlib
import math
import random
from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class PrefixRouter(RequestRouter):
    """Requests with equal session ids (see `prefix_key`) go to one replica, unless its queue is much longer.

    Each key has an order of its own among the replicas (rendezvous hashing), the same in every process, so that only
    the keys of a replica that goes move, and what is too much for one is always taken by the same next one.
    """

    def initialize_state(self, slack: int) -> None:
        """So many requests more than the least busy replica has may wait for the preferred one."""
        self._slack = slack

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica to try first, then all others."""
        key = ""
        if pending_request is not None:
            key = pending_request.metadata.session_id
            pending_request.routing_context.should_backoff = True  # else full replicas would be asked without a pause
        if not key or len(candidate_replicas) < 2:
            few = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
            return [few, candidate_replicas]
        lengths = {r.replica_id: self.replica_queue_len_cache.get(r.replica_id) or 0 for r in candidate_replicas}
        most = min(lengths.values()) + self._slack
        ranked = sorted(candidate_replicas, key=lambda replica: _rank(key, replica.replica_id.unique_id))
        first = next(replica for replica in ranked if lengths[replica.replica_id] <= most)
        return [[first], [replica for replica in ranked if replica is not first]]


def _rank(key: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{key} {replica}".encode(), digest_size=8).digest()


class QueuedTokens:
    """As many replicas as the prompt tokens that wait call for, and never fewer than those that run are worth."""

    def __init__(self, tokens_per_replica: int):
        """One replica may have so many prompt tokens waiting."""
        self.tokens_per_replica = tokens_per_replica

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Ray's question; it waits for as long as its configuration says before it follows the answer."""
        reported = context.aggregated_metrics or {}
        waiting = sum(reported.get("waiting_tokens", {}).values())
        busy = sum(reported.get("busy", {}).values())
        wanted = max(math.ceil(waiting / self.tokens_per_replica), math.ceil(busy), 1)
        low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(wanted, low), high), {}
