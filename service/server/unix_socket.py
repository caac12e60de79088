"""A listening Unix socket and its file, with the configured permissions. It exists from startup to the drain."""

import errno
import fcntl
import os
import socket
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self


class UnixListener(socket.socket):
    """A listener that removes its file when it is closed, unless another socket has taken the path.

    `PATH.lock` is locked while the listener is open. A connection attempt alone cannot distinguish a socket that is
    bound but does not listen yet from a stale one.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._path: Path | None = None  # None in a duplicate of the listener
        self._file = (0, 0)
        self._lock = -1

    @classmethod
    def bind_to(cls, path: Path, mode: int) -> Self:
        """Bind to a path, with `mode` as the permissions of its file. A stale socket at the path is replaced.

        Raises OSError if the path is in use, is another kind of file or cannot be written.
        """
        path = path.absolute()
        with ExitStack() as undo:
            lock = take_lock(lock_file(path))
            undo.callback(release_lock, lock_file(path), lock)
            listener = cls(socket.AF_UNIX, socket.SOCK_STREAM)
            undo.callback(listener.close)
            remove_stale(path)
            mask = os.umask(0o777 & ~mode)
            try:
                listener.bind(os.fspath(path))
            finally:
                os.umask(mask)
            listener._path, listener._file, listener._lock = path, identity(path), lock
            undo.pop_all()
        return listener

    def close(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            with suppress(OSError):
                if identity(path) == self._file:
                    path.unlink()
            release_lock(lock_file(path), self._lock)
        super().close()


def lock_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def identity(file: Path | int) -> tuple[int, int]:
    """Return the device and the inode of a file. Raises OSError if it does not exist."""
    found = os.fstat(file) if isinstance(file, int) else file.lstat()
    return found.st_dev, found.st_ino


def take_lock(path: Path) -> int:
    """Lock a file, which is created if it does not exist. Returns its descriptor. Raises OSError if it is locked."""
    while True:
        with ExitStack() as undo:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            undo.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise in_use() from None
            # The process that had the lock may have just removed the file.
            with suppress(FileNotFoundError):
                if identity(path) == identity(lock):
                    undo.pop_all()
                    return lock


def release_lock(path: Path, lock: int) -> None:
    """Remove a locked file, then unlock it."""
    with suppress(OSError):
        path.unlink()
    os.close(lock)


def remove_stale(path: Path) -> None:
    """Remove a socket that no process listens at. Raises OSError for a socket in use and for any other file."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise FileExistsError(errno.EEXIST, "the path exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # its backlog is full
            pass
    raise in_use()


def in_use() -> OSError:
    return OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
