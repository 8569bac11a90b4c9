"""One of two ranks that save together. Rank 1 exits without a message before or during the second step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast import checkpoint
from holdfast.checkpoint.saving import writer
from holdfast.core.errors import PeerLostError


def leave(*_: object, **__: object) -> None:
    os._exit(0)


def main(folder: Path, when: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=RANK, world_size=2)
    model = torch.nn.Linear(4, 6)
    checkpoint.save(folder / "tier", step=1, group=dist.group.WORLD, model=model)
    if RANK == 1 and when == "before":
        leave()
    if RANK == 1 and when == "within":
        writer.write_share = leave
    try:
        checkpoint.save(folder / "tier", step=2, group=dist.group.WORLD, model=model)
    except PeerLostError as error:
        print(error)


if __name__ == "__main__":
    RANK = int(os.environ["RANK"])
    main(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # destroying a group that lost a rank may wait for it
