"""A plain script: knows nothing of Holdfast, writes its environment, ends when the test says so."""

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
temporary.rename(folder / f"env-{rank}-{count}.json")
print(f"rank {rank} runs")
while not (folder / "finish").exists():
    time.sleep(0.02)
sys.exit(0)
