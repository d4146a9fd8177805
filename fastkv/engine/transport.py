"""How the engine's loop reaches its worker: serialised messages, in this process or to another one.

Both transports carry the same bytes, so whatever works inline works across processes. Called by `LLM`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol

import msgspec

from fastkv.config import Config
from fastkv.core.messages import (
    AnyMessage,
    Done,
    Failure,
    PollResult,
    Shutdown,
    StepResult,
    WorkerReady,
    decode,
    encode,
)
from fastkv.core.transfers import TransferAck
from fastkv.engine.interrupts import blocked_signals, interruptible
from fastkv.engine.runtime_env import prepare_runtime, quiet_paddle_import
from fastkv.errors import (
    ConfigError,
    FastKVError,
    InvariantError,
    RequestError,
    StorageError,
    TransferError,
    WorkerError,
)

if TYPE_CHECKING:
    from fastkv.engine.worker import ModelWorker

_SOCKET = (socket.AF_UNIX, socket.SOCK_STREAM)
_CLOSE_MARGIN_S = 15.0  # the worker waits for copies, then for storage; it gives up first, and says why

_ERRORS: dict[str, type[FastKVError]] = {
    error.__name__: error
    for error in (ConfigError, RequestError, InvariantError, StorageError, TransferError, WorkerError)
}


class WorkerTransport(Protocol):
    """A worker that answers one message with one message."""

    ready: WorkerReady

    def call(self, message: AnyMessage) -> AnyMessage:
        """Send a message, wait for its answer.

        Raises:
            FastKVError: what the worker reported, as the class that it raised there; WorkerError if it died.
        """
        ...

    def close(self) -> None:
        """Free the worker's memory and end its process, if it has one. Legal twice, and when the worker died before.

        Raises:
            FastKVError: what the worker could not finish or free.
        """
        ...


class InlineWorker:
    """The worker in this process; messages are still serialised, so nothing but bytes crosses.

    Args:
        config: what to load.
        rank: tensor-parallel rank.
    """

    def __init__(self, config: Config, rank: int = 0) -> None:
        if "paddle" not in sys.modules:
            prepare_runtime()
        with quiet_paddle_import():
            from fastkv.engine.worker import ModelWorker

        self._worker: ModelWorker | None = ModelWorker(config, rank)
        self.ready = self._worker.ready

    def call(self, message: AnyMessage) -> AnyMessage:
        """See WorkerTransport."""
        if self._worker is None:
            raise WorkerError("the worker is closed; make a new engine")
        return _checked(decode(encode(self._worker.handle(decode(encode(message))))))

    def close(self) -> None:
        """See WorkerTransport."""
        if self._worker is not None:
            with interruptible():  # a disk may be slow, and nothing is booked any more
                _checked(self._worker.handle(Shutdown()))
            self._worker = None  # not before: a failed close can be repeated


class ProcessWorker:
    """The worker in a process of its own, reached over a socket pair.

    Args:
        config: what to load; it crosses as MessagePack.
        rank: tensor-parallel rank.
        module: what the process runs; it serves its socket as fastkv.engine.worker_process does.

    Raises:
        FastKVError: what the worker reported while it started.
        WorkerError: it died.
    """

    def __init__(self, config: Config, rank: int = 0, module: str = "fastkv.engine.worker_process") -> None:
        ours, theirs = socket.socketpair(*_SOCKET)
        with theirs:
            command = [sys.executable, "-m", module, str(theirs.fileno())]
            with blocked_signals():  # as the worker's, too, from its first instruction on
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._connection = Connection(ours.detach())
        self._unsent = bytearray()  # the rest of a message that was interrupted
        self._late_acks: tuple[TransferAck, ...] = ()
        self._close_timeout_s = config.cache.transfer_timeout_s + _CLOSE_MARGIN_S
        try:
            self._connection.send_bytes(msgspec.msgpack.encode((config, rank)))
            ready = _checked(self._next())
            if not isinstance(ready, WorkerReady):
                raise InvariantError(f"the worker's first message was {type(ready).__name__}")
        except BaseException:
            self.kill()  # it has nothing yet that it could lose
            raise
        self.ready = ready

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def call(self, message: AnyMessage) -> AnyMessage:
        """See WorkerTransport."""
        self.send(message)
        answer = self.receive(message)
        assert answer is not None  # without a timeout it waits for ever, or raises
        return answer

    def send(self, message: AnyMessage, end_s: float | None = None) -> None:
        """The first half of call. Raises WorkerError if the worker died.

        An interrupt comes while the worker takes nothing. What it has not taken by then, or by end_s, goes before the
        next message.
        """
        data = encode(message)
        self._unsent += struct.pack("!i", len(data)) + data  # as Connection.recv_bytes reads it
        while self._unsent:
            with self._whole_message(), socket.fromfd(self._connection.fileno(), *_SOCKET) as ours:
                ours.setblocking(True)  # a default timeout of the program's would stay with the connection
                with contextlib.suppress(BlockingIOError):
                    del self._unsent[: ours.send(self._unsent, socket.MSG_DONTWAIT)]
            if self._unsent and not self._can_send(end_s):
                return

    def receive(self, message: AnyMessage, timeout_s: float | None = None) -> AnyMessage | None:
        """The second half: the answer to a message, or None if there is none yet after timeout_s.

        Raises:
            FastKVError: as call.
        """
        plan_id = getattr(message, "plan_id", 0)
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self._wait(end_s):
            answer = self._next()
            if getattr(answer, "plan_id", plan_id) >= plan_id:
                return self._with_late_acks(_checked(answer))
            # An older id: the answer to a step whose engine was interrupted, or did not wait any longer. What it
            # acknowledges counts.
            if isinstance(answer, (StepResult, PollResult)):
                self._late_acks += answer.acks
        return None

    def close(self) -> None:
        """See WorkerTransport. A worker that does not answer in time is killed."""
        if self._connection.closed:
            self.kill()
            return
        end_s = time.monotonic() + self._close_timeout_s
        try:
            with contextlib.suppress(WorkerError):  # it is gone already, which is what we want
                self.send(Shutdown(), end_s)
            answer = self._last_answer(end_s)
            if answer is not None:
                _checked(answer)
        finally:
            self._connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
            self.kill()

    def kill(self) -> None:
        """End the process at once, whatever it does, and wait until it has ended: then nothing of it runs any more."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _last_answer(self, end_s: float) -> Done | Failure | None:
        """The answer to Shutdown; older ones that nobody waited for are passed over. None: the process is gone."""
        try:
            while self._wait(end_s):
                answer = self._next()
                if isinstance(answer, (Done, Failure)) and not answer.plan_id:  # all other messages have an id
                    return answer
        except WorkerError:
            return None
        raise WorkerError(
            f"the worker did not close within {self._close_timeout_s:g} s and was killed; what it had queued for "
            "storage is lost"
        )

    def _with_late_acks(self, answer: AnyMessage) -> AnyMessage:
        if not self._late_acks or not isinstance(answer, (StepResult, PollResult)):
            return answer
        acks, self._late_acks = self._late_acks + answer.acks, ()
        return msgspec.structs.replace(answer, acks=acks)

    def _wait(self, end_s: float | None) -> bool:
        """Whether a message arrives by then (None: for ever). An interrupt comes here, where nothing is read yet."""
        try:
            with interruptible():
                return self._connection.poll(_seconds_until(end_s))
        except OSError:
            raise self._died() from None

    def _can_send(self, end_s: float | None) -> bool:
        left_s = _seconds_until(end_s)
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLOUT)
        with interruptible():
            return bool(poll.poll(None if left_s is None else left_s * 1000))

    def _next(self) -> AnyMessage:
        self._wait(None)
        with self._whole_message():
            return decode(self._connection.recv_bytes())

    @contextlib.contextmanager
    def _whole_message(self) -> Iterator[None]:
        """Close the connection if a message is cut: whatever followed could not be understood."""
        try:
            yield
        except (EOFError, OSError):
            raise self._died() from None
        except BaseException:
            self._connection.close()
            raise

    def _died(self) -> WorkerError:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return WorkerError("the worker process closed its connection but still runs; start the engine again")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return WorkerError(f"the worker process {how}; its requests are lost, start the engine again")


def _seconds_until(end_s: float | None) -> float | None:
    return None if end_s is None else max(0.0, end_s - time.monotonic())


def _checked(message: AnyMessage) -> AnyMessage:
    """Turn a Failure back into the error that the worker met."""
    if isinstance(message, Failure):
        raise _ERRORS.get(message.kind, WorkerError)(message.message)
    return message
