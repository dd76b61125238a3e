import random

import pytest

from mmspec.engine.line import Line


def after(sizes, time, base=lambda size: 0.0, guess=0.0, line=None):
    line = line or Line()
    for size in sizes:
        line.add(size, time(size), base(size), guess)
    return line


@pytest.mark.parametrize(("fixed", "slope"), [(0.3, 0.0), (0.0, 0.05), (2.0, 0.1), (-0.2, 0.02)])
def test_a_line_is_found(fixed, slope):
    rng = random.Random(0)
    sizes = [rng.randrange(16) for _ in range(200)]
    line = after(sizes, lambda size: 1.0 + fixed + slope * size, base=lambda size: 1.0, line=Line(least=-0.5))
    assert line.slope == pytest.approx(slope, abs=0.01)
    assert line.fixed == pytest.approx(fixed, abs=0.05)


def test_steps_far_below_their_base_do_not_turn_the_line_over():
    """Steps of a tree take half as long as calibrated, and plain ones as long."""
    line = after(
        [0, 16, 16, 16] * 40, lambda size: 1.2 if size else 1.0, base=lambda size: 1 + 0.15 * size, line=Line(-0.5)
    )
    assert line.fixed >= -0.5
    assert 1.0 + line.fixed + line.slope * 16 > 0.0
    again = after([1, 9, 1, 1] * 40, lambda size: 0.05 + 0.08 * size)
    assert (again.fixed, again.slope) == (pytest.approx(0.05, abs=0.1), pytest.approx(0.08, abs=0.03))


def test_steps_of_one_size_show_no_slope():
    assert after([5] * 50, lambda size: 3.0, guess=0.4).slope == 0.4
    assert after([5] * 50, lambda size: 3.0).slope == 0.0


def test_other_load_is_no_slope():
    """A machine that is ten times slower while steps are large, for twenty of two hundred steps."""
    line = after([0, 4, 2, 8] * 25, lambda size: 1.0 + 0.05 * size)
    after([8] * 20, lambda size: 14.0, line=line)
    after([0, 4, 2, 8] * 5, lambda size: 1.0 + 0.05 * size, line=line)
    assert line.slope == pytest.approx(0.05, abs=0.02)
    assert line.fixed < 1.5


def test_an_interruption_is_no_difference():
    line = Line()
    for size, fixed in [(2, 1.0), (8, 3.0)] * 30:
        line.interrupt()
        line.add(size, fixed)
    assert line.slope == 0.0
