import os
import socket
import stat
from pathlib import Path

import pytest

from service.server.sockets import accept_all, stop_accepting, url_of
from service.server.unix_socket import UnixListener


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "quartet.sock"


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


def stale(path: Path) -> None:
    """Leave a socket as a process does that was killed."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_permissions_are_those_that_are_set(path, mode):
    """The file of the socket has exactly the mode, whatever the umask of the process is."""
    before = os.umask(0o022)
    try:
        with UnixListener.bind_to(path, mode) as listener:
            assert f"unix:{path}" == url_of(listener)
            assert mode == stat.S_IMODE(path.stat().st_mode)
        assert 0o022 == os.umask(0o022)
    finally:
        os.umask(before)


def test_the_files_are_removed(path):
    """A closed listener removes its file; its duplicates remove none."""
    with UnixListener.bind_to(path, 0o600) as listener:
        listener.dup().close()
        assert path.exists()
    assert [] == [*path.parent.iterdir()]


def test_a_stale_socket_is_replaced(path):
    """The file that a killed process left is no reason not to start."""
    stale(path)
    path.with_name(f"{path.name}.lock").touch()
    with UnixListener.bind_to(path, 0o600) as listener:
        listener.listen()
        assert connects(path)


@pytest.mark.parametrize("listens", [False, True])
def test_a_socket_in_use_is_not_replaced(path, listens):
    """A second service ends, also while the first one still opens its bundles and does not listen yet."""
    with UnixListener.bind_to(path, 0o600) as listener:
        if listens:
            listener.listen()
        with pytest.raises(OSError, match="Address already in use"):
            UnixListener.bind_to(path, 0o600)
        listener.listen()
        assert connects(path)


def test_the_socket_of_another_program_is_not_replaced(path):
    """The socket of a program without our lock file is kept."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(OSError, match="Address already in use"):
            UnixListener.bind_to(path, 0o600)
        assert connects(path)
    assert [path] == [*path.parent.iterdir()]


def test_another_file_is_not_replaced(path):
    """A file with contents stays, and the message says what it is."""
    path.write_text("precious")
    with pytest.raises(OSError, match="exists and is not a socket"):
        UnixListener.bind_to(path, 0o600)
    assert "precious" == path.read_text()


def test_the_socket_of_a_successor_stays(path):
    """A listener does not remove a file that is no longer its own."""
    with UnixListener.bind_to(path, 0o600):
        path.unlink()
        stale(path)
    assert path.exists()


def test_what_waits_is_accepted_and_nothing_new(path):
    """From the drain on the kernel refuses new connections, and those in the backlog are accepted."""
    with UnixListener.bind_to(path, 0o600) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.listen()
        client.connect(str(path))
        stop_accepting(listener)
        assert not connects(path)
        accepted = [*accept_all(listener)]
        assert 1 == len(accepted)
        accepted[0].close()
