"""RankFiles: one rank's files, opened for writing: recovered, locked, growing within the limits.

Owned by FileConnector; `open_rank` makes one. What always holds: the first num_slots slots have both their payload's
place and their entry on disk, and everything past them is gone.
"""

from __future__ import annotations

import os
from pathlib import Path

from fastkv.errors import StorageError
from fastkv.storage.base import Counters
from fastkv.storage.file_config import FileStoreConfig, RankShare
from fastkv.storage.fileops import FULL_ERRNOS, FileOps
from fastkv.storage.folder import DESCRIPTION_NAME, LOCK_NAME, FileLock, StoreFolder, explained, write_whole
from fastkv.storage.format import ENTRY_BYTES, HEADER_BYTES, MAX_SEGMENTS, IndexIdentity, Record, slot_bytes_for
from fastkv.storage.index_file import IndexFile
from fastkv.storage.namespace import StorageNamespace
from fastkv.storage.segment import SegmentFiles


class RankFiles:
    """Index, segments and writer's lock of one (namespace, rank)."""

    def __init__(
        self, folder: StoreFolder, path: Path, lock: FileLock, index: IndexFile, segments: SegmentFiles, max_bytes: int
    ) -> None:
        self._folder, self._lock, self._max_bytes = folder, lock, max_bytes
        self.path, self.index, self.segments = path, index, segments
        self.description_path = path.parent / DESCRIPTION_NAME
        self.num_slots = 0
        self.capacity_slots = 0

    def recover(self, capacity_slots: int) -> list[Record]:
        """Agree on how many slots there are, and read their entries. Hold the folder's lock."""
        identity = self.index.identity
        self.capacity_slots = min(capacity_slots, MAX_SEGMENTS * identity.slots_per_segment)
        self._resize(self.segments.whole_slots(min(self.index.num_slots, self.capacity_slots)))
        room = self._folder.make_room(0, self._max_bytes, identity.namespace)
        if room < 0:  # the limit was lowered, and others that are in use hold the rest
            self._resize(max(0, self.num_slots + room // self._unit_bytes))
        self.segments.mark_unsynced(self.num_slots)
        self.index.begin_epoch()
        return self.index.load(self.num_slots)

    def grow(self, timeout_s: float) -> bool:
        """Add up to one segment; False if the share or the store's limit has no room for a slot more.

        On a disk that is too full for a whole segment, a half, a quarter, ... of it is tried.

        Raises:
            StorageError: the folder's lock was not to be had in time.
            OSError: the disk is full or failed; nothing changed.
        """
        per_segment = self.index.identity.slots_per_segment
        target = min(self.capacity_slots, (self.num_slots // per_segment + 1) * per_segment)
        with self._folder.locked(timeout_s):
            wanted = (target - self.num_slots) * self._unit_bytes
            room = self._folder.make_room(wanted, self._max_bytes, self.index.identity.namespace)
            added = min(target - self.num_slots, max(room, 0) // self._unit_bytes)
            while added > 0:
                try:
                    self._extend(self.num_slots + added)
                except OSError as error:
                    if error.errno not in FULL_ERRNOS or added == 1:
                        raise
                    added //= 2
                else:
                    return True
        return False

    def close(self) -> None:
        """Close the files, then let go of the lock."""
        self.segments.close()
        self.index.close()
        self._lock.release()

    @property
    def _unit_bytes(self) -> int:
        return self.index.identity.slot_bytes + ENTRY_BYTES

    def _extend(self, slots: int) -> None:
        self.segments.allocate(slots)
        try:
            self.index.resize(slots)
        except OSError:
            self.segments.cut(self.num_slots)
            raise
        self.num_slots = slots

    def _resize(self, slots: int) -> None:
        self.segments.cut(slots)
        self.index.resize(slots)
        self.num_slots = slots


def open_rank(
    config: FileStoreConfig, namespace: StorageNamespace, rank: int, ops: FileOps, counters: Counters
) -> tuple[RankFiles, list[Record]]:
    """Open or create one rank's files for writing, and the records in them.

    An index that is torn, of another version or of another namespace is replaced by an empty one (counter "resets").

    Raises:
        ConfigError: the path cannot be a store, the limit holds no record, no such rank.
        StorageError: another process writes here, the store is full of others' open namespaces, the disk failed.
    """
    share = RankShare.of(config, namespace)
    if namespace.writer_rank(rank) != rank:
        raise StorageError(f"rank {rank} holds the same bytes as rank 0, which stores them; open a reader")
    folder = StoreFolder.open(Path(config.path), config.lock_timeout_s)
    with explained(folder.root), folder.locked():
        path = folder.rank_path(namespace.digest, rank)
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock.acquire(path / LOCK_NAME, 0.0)
        if lock is None:
            holder = FileLock.holder(path / LOCK_NAME)
            is_ours = holder == str(os.getpid())
            whose = f"{holder}, which is this one or has its number in another container" if is_ours else holder
            raise StorageError(
                f"{path} is open for writing by process {whose}; one engine at a time can store there: close the other "
                "one or give this one its own storage.path",
                level="storage",
            )
        try:
            _describe(path.parent / DESCRIPTION_NAME, namespace)
            index = _open_index(folder, path, config.max_bytes, share, namespace, rank, ops, counters)
            segments = SegmentFiles(path, index.identity, ops, writable=True)
            files = RankFiles(folder, path, lock, index, segments, config.max_bytes)
            try:
                records = files.recover(share.capacity_slots)
                for parent in (path, path.parent, folder.root):
                    ops.sync_folder(parent)
            except (OSError, StorageError):
                segments.close()
                index.close()
                raise
        except (OSError, StorageError):
            lock.release()
            raise
    return files, records


def _describe(path: Path, namespace: StorageNamespace) -> None:
    text = namespace.to_json()
    if not path.exists() or path.read_bytes() != text:
        write_whole(path, text)
    os.utime(path)


def _open_index(
    folder: StoreFolder,
    path: Path,
    max_bytes: int,
    share: RankShare,
    namespace: StorageNamespace,
    rank: int,
    ops: FileOps,
    counters: Counters,
) -> IndexFile:
    wanted = IndexIdentity(
        namespace.digest,
        rank,
        namespace.record_bytes,
        slot_bytes_for(namespace.record_bytes),
        share.slots_per_segment,
    )
    index = IndexFile.open(path, ops)
    if index is not None:
        found = index.identity
        if IndexIdentity(found.namespace, found.rank, found.record_bytes, found.slot_bytes, 0) == IndexIdentity(
            wanted.namespace, wanted.rank, wanted.record_bytes, wanted.slot_bytes, 0
        ):
            return index
        index.close()
    leftovers = [file for file in path.iterdir() if file.name != LOCK_NAME]
    if leftovers:
        counters.fault("resets", f"{path} had no index that is ours; it starts empty")
        for file in leftovers:
            ops.unlink(file)
    if folder.make_room(HEADER_BYTES, max_bytes, namespace.digest) < HEADER_BYTES:
        raise StorageError(
            f"store {folder.root} is at its limit of {max_bytes} bytes with namespaces that are in use; raise "
            "storage.max_bytes or give this engine its own storage.path",
            level="storage",
        )
    return IndexFile.create(path, wanted, ops)
