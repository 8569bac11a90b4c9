"""Names of the places in which checkpoints are stored, as logs, status and messages give them."""

from __future__ import annotations

from typing import Final

# The tier that all pods of a job see.
SHARED_TIER: Final = "shared"
# The tier that outlives the cluster.
OBJECT_TIER: Final = "object"
# In the memory of each node, for its own ranks and for those of another.
MEMORY_TIER: Final = "memory"
# The same as another node's rank sees it.
PEER_TIER: Final = "peer"
# On the disk of each node, for its own ranks.
LOCAL_TIER: Final = "local"
# Where a state that goes on comes from without any tier: a rank that still had it.
SURVIVOR: Final = "survivor"
