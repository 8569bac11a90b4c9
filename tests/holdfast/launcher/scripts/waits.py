"""A plain script without Holdfast: it writes its environment, and ends at a signal of the test."""

import json
import os
import pathlib
import sys
import time

folder = pathlib.Path(os.environ["TEST_DIR"])
rank = os.environ["RANK"]
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
temporary = folder / f".env-{rank}-{count}"
temporary.write_text(json.dumps(dict(os.environ) | {"pid": os.getpid()}))
print(f"rank {rank} runs", flush=True)  # first, because a test that sees the file may end this process
temporary.rename(folder / f"env-{rank}-{count}.json")
while not (folder / "finish").exists():
    time.sleep(0.02)
sys.exit(0)
