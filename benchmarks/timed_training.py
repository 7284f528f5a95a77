"""fairseq-train with the flags that follow; its last line of output says when its updates began.

Nothing of this package is imported here: without ``--user-dir`` this is bare fairseq.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any, List, Tuple

from fairseq.trainer import Trainer
from fairseq_cli.train import cli_main

begun: List[Tuple[float, float]] = []
_train_step = Trainer.train_step


def _timed(self: Trainer, *args: Any, **kwargs: Any) -> Any:
    begun.append((time.perf_counter(), time.process_time()))
    return _train_step(self, *args, **kwargs)


def main() -> None:
    Trainer.train_step = _timed
    cli_main()
    (peak,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps({"begun": begun, "mib": int(peak) / 2**10}), flush=True)


if __name__ == "__main__":
    main()
