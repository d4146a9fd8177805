"""StoreFolder: the tree of one store on disk, its locks, and the limit over all namespaces in it.

    STORE_DIR/
      fastkv-store.json        marker: this folder is a store, and of which format
      store.lock               held for moments: while something opens, grows or is deleted
      <namespace, 64 hex>/
        namespace.json         what the namespace is, for people; its time is that of the last use
        rank-<r>/              written by one process: rank r, or rank 0 for all where ranks hold the same bytes
          lock                 held by that process for as long as it writes here; its pid is inside
          index, segment-*     format.py

Used by FileConnector (opening, growing) and by the command line. A namespace is idle when none of its rank locks is
held. When the store has reached its limit, whole idle namespaces are deleted, the longest unused first: they are other
models, or this one with older weights. Locks are flock: the kernel lets go of them when their process dies.

Whoever takes or probes a rank's lock holds store.lock, so a probe never makes somebody else's opening fail.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastkv.errors import ConfigError, StorageError
from fastkv.storage.index_file import INDEX_NAME
from fastkv.storage.namespace import StorageNamespace

MARKER_NAME = "fastkv-store.json"
DESCRIPTION_NAME = "namespace.json"
LOCK_NAME = "lock"
LOCK_BYTES = 64
_MARKER = b'{"format": "fastkv-store", "version": 1}\n'
_POLL_S = 0.002
_UNUSABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.EISDIR}


class FileLock:
    """An exclusive flock on a file that names its holder."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._fd = path, fd

    @classmethod
    def acquire(cls, path: Path, timeout_s: float) -> FileLock | None:
        """Take the lock; None if somebody else holds it for longer than timeout_s.

        Who may only read the store can hold its locks, too, but not leave a name in them; NFS refuses readers.

        Raises:
            OSError: the file cannot be opened or locked.
        """
        give_up = time.monotonic() + timeout_s
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() >= give_up:
                        os.close(fd)
                        return None
                    time.sleep(_POLL_S)
                    continue
                with contextlib.suppress(OSError):  # a full disk or a reader: the lock holds without its holder's name
                    os.pwrite(fd, str(os.getpid()).ljust(LOCK_BYTES - 1).encode() + b"\n", 0)
                return cls(path, fd)
        except OSError:
            os.close(fd)
            raise

    @staticmethod
    def holder(path: Path) -> str:
        """Pid that last took the lock, for messages."""
        try:
            return path.read_text().strip() or "unknown"
        except OSError:
            return "unknown"

    def release(self) -> None:
        """Let go. Unlocks first: a child that was forked meanwhile shares the descriptor and would keep the lock."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class RankFolder:
    """One rank's folder as it is on disk.

    Attributes:
        rank: the writing rank.
        path: the folder.
        file_bytes: bytes of all files in it.
        writer_pid: process that has it open for writing, "" for none.
    """

    rank: int
    path: Path
    file_bytes: int
    writer_pid: str


@dataclass(frozen=True, slots=True)
class NamespaceFolder:
    """One namespace as it is on disk.

    Attributes:
        digest: the namespace's digest, from the folder's name.
        path: the folder.
        description: what it is; None if the description is missing or not this folder's.
        last_used_s: Unix time of the last opening or closing.
        file_bytes: bytes of all files.
        ranks: its rank folders, ascending.
    """

    digest: bytes
    path: Path
    description: StorageNamespace | None
    last_used_s: float
    file_bytes: int
    ranks: tuple[RankFolder, ...]

    @property
    def writer_pids(self) -> tuple[str, ...]:
        """Processes that have it open for writing."""
        return tuple(rank.writer_pid for rank in self.ranks if rank.writer_pid)


class StoreFolder:
    """A store's tree. Make one with `open` (creates it) or `existing`."""

    def __init__(self, root: Path, lock_timeout_s: float) -> None:
        self.root, self._lock_timeout_s = root, lock_timeout_s

    @classmethod
    def open(cls, root: Path, lock_timeout_s: float = 10.0) -> StoreFolder:
        """The store at root, created if there is none.

        Raises:
            ConfigError: root cannot be a store: no folder, no permission, somebody else's files, another format.
            StorageError: the disk failed.
        """
        with explained(root):
            root.mkdir(parents=True, exist_ok=True)
            # Listed before the marker is looked for: whoever creates the store meanwhile writes the marker first.
            foreign = [path.name for path in root.iterdir() if not path.name.startswith((MARKER_NAME, "store.lock"))]
            if not (root / MARKER_NAME).exists():
                if foreign:
                    raise ConfigError(
                        f"{root} is not empty and no fastkv store (it holds {foreign[0]!r}); give an empty folder"
                    )
                write_whole(root / MARKER_NAME, _MARKER)
        return cls.existing(root, lock_timeout_s)

    @classmethod
    def existing(cls, root: Path, lock_timeout_s: float = 10.0) -> StoreFolder:
        """The store at root.

        Raises:
            ConfigError: there is none, or it has another format.
        """
        with explained(root):
            marker = (root / MARKER_NAME).read_bytes() if (root / MARKER_NAME).exists() else None
        if marker is None:
            raise ConfigError(f"{root} is no fastkv store: it has no {MARKER_NAME}; give the folder in storage.path")
        if marker != _MARKER:
            raise ConfigError(f"{root} is a store of another format ({marker[:80]!r}); this version reads {_MARKER!r}")
        return cls(root, lock_timeout_s)

    @contextmanager
    def locked(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold store.lock.

        Raises:
            StorageError: somebody else held it for longer than the timeout.
            OSError: the lock file cannot be opened.
        """
        path = self.root / "store.lock"
        lock = FileLock.acquire(path, self._lock_timeout_s if timeout_s is None else timeout_s)
        if lock is None:
            raise StorageError(f"{path} is held by process {FileLock.holder(path)}; try again when it is done")
        try:
            yield
        finally:
            lock.release()

    def namespace_path(self, digest: bytes) -> Path:
        """Folder of a namespace."""
        return self.root / digest.hex()

    def rank_path(self, digest: bytes, rank: int) -> Path:
        """Folder of one rank of a namespace."""
        return self.namespace_path(digest) / f"rank-{rank}"

    def used_bytes(self) -> int:
        """Bytes of all files of the store."""
        return sum(_file_bytes(path) for path in self.root.iterdir())

    def make_room(self, wanted_bytes: int, max_bytes: int, keep: bytes) -> int:
        """Bytes by which the store may grow, after deleting idle namespaces other than keep if it must.

        Hold `locked`. Deletes no more than wanted_bytes need.
        """
        room = max_bytes - self.used_bytes()
        if room >= wanted_bytes:
            return room
        idle = [ns for ns in self.namespaces() if ns.digest != keep and not ns.writer_pids]
        for namespace in sorted(idle, key=lambda ns: ns.last_used_s):
            self.delete(namespace)
            room = max_bytes - self.used_bytes()
            if room >= wanted_bytes:
                break
        return room

    def namespaces(self) -> list[NamespaceFolder]:
        """All namespaces, the longest unused first. Hold `locked`."""
        found = []
        for path in self.root.iterdir():
            digest = _digest_of(path)
            if digest is not None:
                found.append(self._namespace(digest, path))
        return sorted(found, key=lambda ns: ns.last_used_s)

    def delete(self, namespace: NamespaceFolder) -> None:
        """Delete an idle namespace. Hold `locked` since it was listed: then it is still idle.

        Raises:
            StorageError: a process has it open for writing.
        """
        if namespace.writer_pids:
            raise StorageError(
                f"namespace {namespace.digest.hex()[:12]} is open for writing by process "
                f"{', '.join(namespace.writer_pids)}; stop it first"
            )
        # The index goes first: what a crash leaves behind is then files without an index, which nobody reads.
        ordered = sorted(_walk(namespace.path), key=lambda p: (p.name == DESCRIPTION_NAME, p.name != INDEX_NAME))
        for path in ordered:
            path.unlink(missing_ok=True)
        shutil.rmtree(namespace.path)

    def _namespace(self, digest: bytes, path: Path) -> NamespaceFolder:
        ranks = []
        for folder in path.iterdir():
            number = folder.name.removeprefix("rank-")
            if folder.is_dir() and folder.name.startswith("rank-") and number.isdigit():
                ranks.append(RankFolder(int(number), folder, _file_bytes(folder), _writer_pid(folder)))
        described = path / DESCRIPTION_NAME
        return NamespaceFolder(
            digest=digest,
            path=path,
            description=_read_description(described, digest),
            last_used_s=(described if described.exists() else path).stat().st_mtime,
            file_bytes=_file_bytes(path),
            ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),
        )


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file so that it is seen whole or not at all, after a power loss too. Raises OSError."""
    scratch = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")  # containers on one volume may have equal pids
    try:
        with scratch.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


@contextmanager
def explained(root: Path) -> Iterator[None]:
    """Turn what the system refuses while a store is opened into a ConfigError or a StorageError."""
    try:
        yield
    except OSError as error:
        if error.errno in _UNUSABLE:
            raise ConfigError(f"storage.path {root} cannot be used: {error}; give a writable folder") from error
        raise StorageError(f"store {root} cannot be opened: {error}", level="storage") from error


def _read_description(path: Path, digest: bytes) -> StorageNamespace | None:
    try:
        description = StorageNamespace.from_json(path.read_bytes())
    except (OSError, ConfigError):
        return None  # shown as unknown; the bytes do not depend on it
    return description if description.digest == digest else None


def _writer_pid(folder: Path) -> str:
    path = folder / LOCK_NAME
    if not path.exists():
        return ""
    holder = FileLock.holder(path)  # before the probe writes our own pid
    lock = FileLock.acquire(path, 0.0)
    if lock is None:
        return holder
    lock.release()
    return ""


def _digest_of(path: Path) -> bytes | None:
    if len(path.name) != 64 or not path.is_dir():
        return None
    try:
        return bytes.fromhex(path.name)
    except ValueError:
        return None


def _walk(path: Path) -> list[Path]:
    return [Path(folder, name) for folder, _, names in os.walk(path) for name in names]


def _file_bytes(path: Path) -> int:
    """Bytes of a file, or of all files in a folder. What vanishes meanwhile counts as nothing."""
    total = 0
    for file in [path] if path.is_file() else _walk(path):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            continue
    return total
