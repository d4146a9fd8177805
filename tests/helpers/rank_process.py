"""A rank without a model, in a process of its own: python -m helpers.rank_process FD

Serves the messages of fastkv.engine.worker_process that move blocks, and between them commands of the test, as lists:
fill (block -> label), poison, wrong (block -> label) -> list, stall (the next copy), break (the next answer is an
error). `RankWorker` is its other end.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from fastkv.config import Config
from fastkv.core.messages import (
    AnyMessage,
    Done,
    Failure,
    Poll,
    SetWeightsVersion,
    Shutdown,
    Sleep,
    Wake,
    WorkerReady,
    decode,
    encode,
)
from fastkv.engine.runtime_env import prepare_runtime
from fastkv.engine.transport import ProcessWorker
from fastkv.errors import ConfigError, FastKVError

_COMMAND = b"\xc1"  # never used by MessagePack


class RankWorker(ProcessWorker):
    """The test's end."""

    def __init__(self, config: Config, rank: int) -> None:
        super().__init__(config, rank, "helpers.rank_process")

    def command(self, name: str, *args: Any) -> Any:
        """Have the process do something that no engine asks for."""
        self._connection.send_bytes(_COMMAND + msgspec.msgpack.encode([name, *args]))
        return msgspec.msgpack.decode(self._connection.recv_bytes())


def main(fd: int) -> int:
    """Serve until Shutdown, or until the test is gone."""
    connection = Connection(fd)
    config, rank = msgspec.msgpack.decode(connection.recv_bytes(), type=tuple[Config, int])
    prepare_runtime()
    from helpers.copies import device_memory, faulty, pattern, poison, wrong_pieces

    from fastkv import CacheController
    from fastkv.engine.tier_worker import TierWorker
    from fastkv.worker.storage_access import open_storage, storage_namespace

    broken: list[Exception] = []
    wrap, copiers = faulty(-1, "stall")
    controller = CacheController(config, rank, wrap_copier=wrap)
    controller.initialize_all()
    if config.storage is not None:
        controller.attach_storage(open_storage(config, storage_namespace(config, "weights"), rank))
    worker = TierWorker(controller)
    blocks = (controller.num_blocks, controller.num_host_blocks)
    connection.send_bytes(encode(WorkerReady(*blocks, "uint8", 0, 0, 0, 1, "weights")))
    while True:
        try:
            data = connection.recv_bytes()
        except (EOFError, OSError):
            return 0
        answer: Any = None
        if data.startswith(_COMMAND):
            name, *args = msgspec.msgpack.decode(data[1:], strict=False)
            if name == "fill":
                for (layer, role), memory in device_memory(controller).items():
                    for block, label in args[0]:
                        memory[block] = pattern(rank, layer, role, label, memory.shape[1])
            elif name == "poison":
                poison(controller)
            elif name == "wrong":
                answer = wrong_pieces(controller, dict(args[0]))
            elif name == "break":
                broken.append(ZeroDivisionError("on purpose") if args[0] == "python" else ConfigError("on purpose"))
            elif name == "stall":
                copiers[0].at = copiers[0].calls
            connection.send_bytes(msgspec.msgpack.encode(answer))
            continue
        message = decode(data)
        plan_id = getattr(message, "plan_id", 0)
        try:
            if isinstance(message, Shutdown):
                worker.close()
                reply: AnyMessage = Done(plan_id)
            else:
                assert isinstance(message, (Poll, SetWeightsVersion, Sleep, Wake))
                reply = worker.handle(message)
            if broken:
                raise broken.pop()
        except FastKVError as error:
            reply = Failure(plan_id, type(error).__name__, str(error))
        except Exception as error:  # as ModelWorker.handle
            reply = Failure(plan_id, "WorkerError", f"{type(error).__name__}: {error}")
        connection.send_bytes(encode(reply))
        if isinstance(message, Shutdown):
            return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
