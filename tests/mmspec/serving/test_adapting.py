"""A server whose drafters learn: the same answers, and a table that the next start goes on from."""

import json

from click.testing import CliRunner

from mmspec.adaptation import AdaptOptions
from mmspec.drafters.recycle import Recycle
from mmspec.drafters.union import PerSequence
from mmspec.serving import command
from mmspec.serving.limits import Limits
from mmspec.serving.settings import ServerSettings
from tests.model_folders import save_text_model
from tests.testkit.served import served

LIMITS = Limits(max_running=2, max_tokens=16)


def settings(model, adapt=None):
    loading = {"model": str(model), "drafter": "recycle", "device": "cpu", "dtype": "float32"}
    return ServerSettings({**loading, "generation_config": "auto"}, LIMITS, {}, adapt=adapt)


def test_answers_are_equal_and_the_table_is_kept(tmp_path):
    model = save_text_model(tmp_path / "model")
    plain = settings(model).pipeline()
    assert isinstance(plain.drafter, PerSequence)
    options = AdaptOptions(tmp_path / "learned")
    pipe = settings(model, options).pipeline()
    (table,) = pipe.drafter.members
    assert isinstance(table, Recycle)
    with served(pipe) as server:
        for prompt in ("one, two", "one, two, one", "one, two"):
            request = {"model": pipe.name, "prompt": prompt, "max_tokens": 12, "temperature": 0}
            response = server.post(request, "completions")
            expected = plain.generate(prompt, max_new_tokens=12, temperature=0.0, chat_template=False)
            assert response.json()["choices"][0]["text"] == expected.text
    assert table.entries > 0
    (kept,) = (tmp_path / "learned" / "recycle").iterdir()
    assert json.loads((kept / "config.json").read_text())["mmspec_drafter"] == "recycle"
    again = settings(model, options).pipeline()
    assert again.drafter.entries == table.entries
    for one in (plain, pipe, again):
        one.engine.drain()


def test_options_of_the_command(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(command, "_here", lambda settings, host, port: given.append(settings.adapt))
    for options in ([], ["--adapt"], ["--adapt-folder", str(tmp_path), "--adapt-space", "64"]):
        assert CliRunner().invoke(command.serve, options).exit_code == 0
    assert given == [None, AdaptOptions(), AdaptOptions(tmp_path, 64)]
    result = CliRunner().invoke(command.serve, ["--engine", "ray", "--adapt-folder", str(tmp_path)])
    assert "--adapt-folder is written by one process: expected --engine local, received ray" in str(result.exception)
