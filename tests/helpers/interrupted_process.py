"""A worker that a terminal's Ctrl-C, and its system's end, hit before it has imported anything."""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    from fastkv.engine.worker_process import main

    sys.exit(main(int(sys.argv[1])))
