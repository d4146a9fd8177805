"""Entry point of a worker in its own process: python -m fastkv.engine.worker_process FD

FD is the number of an inherited socket. First the engine sends (config, rank), then messages until Shutdown or until
the engine is gone. The process never outlives its engine: the socket's end ends it. SIGINT and SIGTERM are blocked by
whoever starts it: sent to a group, they reach the engine too, which ends its worker in order.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

import msgspec

from fastkv.config import Config
from fastkv.core.messages import Failure, Shutdown, decode, encode
from fastkv.engine.runtime_env import prepare_runtime, quiet_paddle_import
from fastkv.errors import FastKVError


def main(fd: int) -> int:
    """Serve one engine. Returns the exit code."""
    connection = Connection(fd)
    try:
        start = connection.recv_bytes()
    except (EOFError, OSError):
        return 0  # the engine was interrupted before it had said anything
    config, rank = msgspec.msgpack.decode(start, type=tuple[Config, int])
    prepare_runtime()
    with quiet_paddle_import():
        from fastkv.engine.worker import ModelWorker
    try:
        try:
            worker = ModelWorker(config, rank)
        except FastKVError as error:
            connection.send_bytes(encode(Failure(0, type(error).__name__, str(error))))
            return 1
        except Exception as error:  # the top of the process: the engine has to hear of it
            connection.send_bytes(encode(Failure(0, "WorkerError", f"{type(error).__name__}: {error}")))
            return 1
        connection.send_bytes(encode(worker.ready))
        while True:
            message = decode(connection.recv_bytes())
            connection.send_bytes(encode(worker.handle(message)))
            if isinstance(message, Shutdown):
                return 0
    except (EOFError, OSError):
        return 0  # the engine is gone


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
