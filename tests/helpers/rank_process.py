"""A rank without a model, in a process of its own: python -m helpers.rank_process FD

Serves the messages of fastkv.engine.worker_process that move blocks, and between them commands of the test, as lists:
fill (block -> label), poison, wrong (block -> label) -> list, stall (the next copy). `RankWorker` is its other end.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from fastkv.config import Config
from fastkv.core.messages import Failure, Poll, SetWeightsVersion, Shutdown, Sleep, Wake, WorkerReady, decode, encode
from fastkv.engine.runtime_env import prepare_runtime
from fastkv.engine.transport import ProcessWorker
from fastkv.errors import FastKVError

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
            elif name == "stall":
                copiers[0].at = copiers[0].calls
            connection.send_bytes(msgspec.msgpack.encode(answer))
            continue
        message = decode(data)
        if isinstance(message, Shutdown):
            worker.close()
            return 0
        try:
            assert isinstance(message, (Poll, SetWeightsVersion, Sleep, Wake))
            connection.send_bytes(encode(worker.handle(message)))
        except FastKVError as error:
            connection.send_bytes(encode(Failure(message.plan_id, type(error).__name__, str(error))))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
