"""A tree step of a Mamba-2 model allocates much less than its recurrent states take."""

import json

from click.testing import CliRunner

from mmspec.eval import ssm_memory


def test_a_tree_takes_less_memory_than_one_state():
    run = CliRunner().invoke(ssm_memory.main, ["--layers", "2", "--nodes", "4"])
    assert run.exit_code == 0, run.output
    states, token, tree, snapshots = json.loads(run.output.splitlines()[-1])["bytes"].values()
    assert states == 2 * 128 * 64 * 128 * 4
    assert 0 < token < tree < states
    assert snapshots == 4 * states
