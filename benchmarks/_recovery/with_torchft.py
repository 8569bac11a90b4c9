"""The script of torchft: each rank is a separate replica group; the survivors continue without the lost one."""

import os

import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from workload import Trace, batch, loss_of, prepare


def main() -> None:
    rank, full = int(os.environ["BENCH_RANK"]), int(os.environ["BENCH_FULL"])
    plain, inner = prepare()

    def load(saved: dict[str, object]) -> None:
        plain.load_state_dict(saved["model"])
        inner.load_state_dict(saved["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica-{rank}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    model = DistributedDataParallel(manager, plain)
    optimizer = Optimizer(manager, inner)
    trace = Trace(rank)
    while manager.current_step() < int(os.environ["BENCH_STEPS"]):
        before = manager.current_step()
        optimizer.zero_grad()  # requests a quorum
        trace.begin()
        loss_of(model, batch(before, rank, full)).backward()
        optimizer.step()
        if manager.current_step() > before:
            trace.made(manager.current_step(), f"0.{manager.num_participants()}")


if __name__ == "__main__":
    main()
