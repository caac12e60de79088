"""A series keeps every value of a short run, and means of equal width of a long one."""

from model.training.series import MOST_POINTS, Series


def test_a_short_run_is_exact():
    """Fewer values than points are kept as they are."""
    series = Series()
    for step in range(MOST_POINTS - 1):
        series.add(step, float(step))

    assert [(step, float(step)) for step in range(MOST_POINTS - 1)] == series.points


def test_a_long_run_is_bounded():
    """A series keeps a bounded number of means, and the mean of all values, also after it is restored."""
    series = Series()
    for step in range(8 * MOST_POINTS):
        series.add(step, float(step % 100))
        series = Series.restore(series.state())

    assert MOST_POINTS / 2 <= len(series.points) < MOST_POINTS
    assert 8 * MOST_POINTS - 1 == series.points[-1][0]
    assert 49.5 == sum(value for _, value in series.points) / len(series.points)
