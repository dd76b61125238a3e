"""A tree step of a Mamba-2 model allocates less than one with a state per node, and gives the same states."""

import json

from click.testing import CliRunner

from mmspec.eval import ssm_memory


def test_a_tree_takes_less_memory_than_a_state_per_node(tmp_path):
    out = tmp_path / "memory.json"
    run = CliRunner().invoke(ssm_memory.main, ["--layers", "2", "--nodes", "4", "--out", str(out)])
    assert run.exit_code == 0, run.output
    found = json.loads(out.read_text())
    assert json.loads(run.output.splitlines()[-1]) == found
    assert found["states_bytes"] == 2 * 128 * 64 * 128 * 4
    assert found["one_token_bytes"] < found["tree_bytes"] < found["states_bytes"]
    assert 4 * found["states_bytes"] < found["snapshots_bytes"]  # a state for each of the four nodes
