"""Excess connections are few, and the newest of them are kept."""

from service.server.connection_table import ConnectionTable


class Connection:
    def __init__(self) -> None:
        self.aborted = False

    def evict(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted = True


def test_the_oldest_is_aborted():
    """Beyond the limit, each new connection ends the one that has been open for longest."""
    table = ConnectionTable(0, 2)
    connections = [Connection() for _ in range(4)]
    assert not any(table.admit(connection) for connection in connections)
    assert [True, True, False, False] == [connection.aborted for connection in connections]


def test_a_closed_connection_takes_no_place():
    """A connection that has ended is not counted, and may be discarded again."""
    table = ConnectionTable(0, 1)
    first, second = Connection(), Connection()
    table.admit(first)
    table.discard(first)
    table.discard(first)
    table.admit(second)
    assert (False, False) == (first.aborted, second.aborted)
