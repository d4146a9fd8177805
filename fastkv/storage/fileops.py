"""The system calls that the file backend makes, in one class, so that a test can make the Nth of them fail.

Called by the writer, the readers and the folder code. Every method either does all it was asked to or raises OSError:
a short write or read never passes for success.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that mean "no room" rather than "broken"."""


class FileOps:
    """Plain POSIX files. Stateless; safe from several threads."""

    def open(self, path: Path, *, create: bool = False, writable: bool = True) -> int:
        """A file descriptor, close-on-exec."""
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT if create else 0) | os.O_CLOEXEC
        return os.open(path, flags, 0o644)

    def close(self, fd: int) -> None:
        """Give the descriptor back."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Bytes of the file."""
        return os.fstat(fd).st_size

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Reserve disk blocks for a range, so that writing into it cannot run out of space. New bytes are zero."""
        os.posix_fallocate(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        """Cut the file to nbytes."""
        os.ftruncate(fd, nbytes)

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        """Write all of data at offset."""
        written = os.pwrite(fd, data, offset)
        while written < len(data):
            more = os.pwrite(fd, memoryview(data)[written:], offset + written)
            if more == 0:
                raise OSError(errno.EIO, "pwrite wrote nothing")
            written += more

    def read_into(self, fd: int, view: memoryview, offset: int) -> None:
        """Fill view from offset; the file ending early is an error."""
        done = os.preadv(fd, [view], offset)
        while done < len(view):
            more = os.preadv(fd, [view[done:]], offset + done)
            if more == 0:
                raise OSError(errno.EIO, "the file ends inside a record")
            done += more

    def read(self, fd: int, nbytes: int, offset: int) -> bytes:
        """Up to nbytes from offset; fewer at the end of the file."""
        return os.pread(fd, nbytes, offset)

    def sync(self, fd: int) -> None:
        """Wait until the file's data is on the disk."""
        os.fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        """Wait until the folder's list of files is on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        """Delete a file; one that is not there is fine."""
        path.unlink(missing_ok=True)
