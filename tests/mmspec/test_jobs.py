"""Jobs on Ray, with a worker that holds no model."""

import signal

import pytest

from mmspec.jobs import run_jobs

pytest.importorskip("ray", reason="needs ray: pip install -e '.[ray]'")

JOBS = [{"number": number} for number in range(5)]


class Adder:
    """Adds a number of the settings to that of a job."""

    def __init__(self, settings):
        self.plus = settings["plus"]

    def __call__(self, job):
        return job["number"] + self.plus


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_ray_gives_what_a_local_run_gives():
    handler = signal.getsignal(signal.SIGTERM)
    done = sorted(run_jobs(JOBS, Adder, {"plus": 10}, engine="ray", workers=2), key=str)
    signal.signal(signal.SIGTERM, handler)  # Ray leaves its own behind
    assert done == list(run_jobs(JOBS, Adder, {"plus": 10}))
