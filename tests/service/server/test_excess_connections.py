"""ExcessConnections connections are few, and the newest of them are kept."""

from service.server.excess_connections import ExcessConnections


class Connection:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_the_oldest_is_cut_off() -> None:
    """Beyond the limit, each new connection ends the one that has been open for longest."""
    excess = ExcessConnections(2)
    connections = [Connection() for _ in range(4)]
    for connection in connections:
        excess.add(connection)
    assert [True, True, False, False] == [connection.aborted for connection in connections]


def test_a_connection_that_is_gone_takes_no_place() -> None:
    """A connection that has ended is not counted, and may be discarded again."""
    excess = ExcessConnections(1)
    first, second = Connection(), Connection()
    excess.add(first)
    excess.discard(first)
    excess.discard(first)
    excess.add(second)
    assert (False, False) == (first.aborted, second.aborted)
