"""``mmspec chat``: conversations from standard input and on a terminal."""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import mmspec
from mmspec import plugins
from mmspec.cli import chat as module
from mmspec.cli.chat import Chat, read_message
from mmspec.cli.session import Answer
from mmspec.engine.stats import Stats
from mmspec.pipeline import Piece
from mmspec.vision.embedded import samples
from tests import thinking
from tests.commandline import Run, assert_user_error, runner
from tests.model_folders import save_gguf

SCENE, SHAPES = samples() / "scene.png", samples() / "five-shapes.png"
FIRST = "Max has 24 apples. He buys 3 bags of 6 apples. How many apples does Max have now?"


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    return runner(capfd, "chat")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def give(*lines: str) -> None:
        content = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))

    return give


def counts(err: str) -> list[tuple[int, int]]:
    """Prompt tokens and cached tokens of each answer."""
    return [(int(a), int(b)) for a, b in re.findall(r"prompt of (\d+) tokens, (\d+) cached", err)]


@pytest.mark.parametrize(
    ("model", "asked", "first", "second"),
    [
        ("tiny-llava", ['/image "{path}" {other}', "Describe the image."], "Describe the image.", "What has {notes}"),
        ("tiny-llava", ['Describe the image. "{path}" {other}'], "Describe the image.", "How many has no.png"),
        ("tiny-llava", ["{escaped}", "Describe the image. {other}"], "Describe the image.", "How many are there?"),
        ("tiny-hybrid", [FIRST], FIRST, "And with 4 bags?"),
    ],
)
def test_a_turn_continues_the_one_before_and_reads_only_what_is_new(
    model: str, asked: list[str], first: str, second: str, run: Run, typed: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """A hybrid's states are kept after a whole prompt, and after an answer that does not end among draft tokens."""
    path, notes = tmp_path / "a picture's copy.png", tmp_path / "notes.txt"
    path.write_bytes(SCENE.read_bytes())
    notes.write_text("no image")
    (tmp_path / "b.png").write_bytes(SHAPES.read_bytes())
    monkeypatch.setenv("HOME", str(tmp_path))
    names = {"path": path, "escaped": re.sub(r"(?=[ '])", r"\\", str(path))}  # as terminals paste them
    given = asked[0]
    asked, second = [line.format(**names, other="~/b.png") for line in asked], second.format(notes=notes)
    typed(f"/image {notes}", *asked, "", f" {second} ", "/save ~/chat.json")
    status, out, err = run("--model", "smollm2", model, "--max-new-tokens", "40", "-c", "400")
    assert (status, err.count("error: "), f"note: {plugins.limits(model)}" in err) == (0, 1, True)
    assert re.findall(r"images of the next message: (\d)", err) == {"/": ["2"], "{": ["1"]}.get(given[0], [])
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [one["role"] for one in messages] == ["user", "assistant"] * 2
    uris = [f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}" for file in (SCENE, SHAPES)]
    images = [{"type": "image_url", "image_url": {"url": uri}} for uri in uris]
    assert messages[0]["content"] == ([*images, {"type": "text", "text": first}] if "llava" in model else first)
    assert messages[2]["content"] == second
    assert out == "".join(f"{one['content']}\n" for one in messages[1::2])
    pipe = mmspec.load(model, drafter=None)
    answers = [pipe.generate(messages[:end], max_new_tokens=40) for end in (1, 3)]
    assert [one.text for one in answers] == [one["content"] for one in messages[1::2]]
    (read, cached), (read_then, cached_then) = counts(err)
    assert [read, read_then] == [one.stats.num_prompt_tokens for one in answers]
    assert cached == 0
    assert read <= cached_then < read_then


def test_a_conversation_is_saved_whole_and_continued(run: Run, typed: Any, tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "a [b] chat.json"
    typed("/save nowhere/none/chat.json", "/load none.json", FIRST, f"/save '{file}'", "/reset", "/save empty.json")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nowhere").touch()
    status, _, err = run("tiny-hybrid", "--system", "Be <|brief|>.", "--max-new-tokens", "8")
    assert status == 0
    assert (err.count("error: "), f"3 messages in {file}\n" in err) == (2, True)
    system, user, _ = json.loads(file.read_text())["messages"]
    assert (system, user["content"]) == ({"role": "system", "content": "Be <|brief|>."}, FIRST)
    assert json.loads((tmp_path / "empty.json").read_text())["messages"] == [system]
    assert {path.name for path in tmp_path.iterdir()} == {"nowhere", file.name, "empty.json"}
    typed(f'/load "{file}"', "And now?", "/save more.json", "/load nowhere", "/save after.json")
    assert run("tiny-hybrid", "--max-new-tokens", "8")[0] == 0
    found = json.loads((tmp_path / "more.json").read_text())["messages"]
    assert (found[:2], found[3]["content"], len(found)) == ([system, user], "And now?", 5)
    assert (tmp_path / "after.json").read_text() == (tmp_path / "more.json").read_text()


WRONG = {
    "/imag a.png": "/image, /reset, /save, /load, /help, /exit, got /imag; did you mean /image?",
    "/image": "/image takes PATH...: got nothing",
    "/save a b": "/save takes FILE: got a b",
    "/reset now": "/reset takes nothing: got now",
    "/save 'a": "/save: expected words or quoted words, got 'a (No closing quotation)",
    f"/image {SCENE}": "the tiny model reads text only: got the image",
    "/load other.json": "other.json: expected an object with a list of messages, received none",
    "/load none.json": "none.json: expected an object with a list of messages, received none",
    "/load text.json": "text.json: expected an object with a list of messages, received none",
    "/load wrong.json": "content",
    "\udc80": "a message must be UTF-8: got bytes that are not",
    '"""begun': 'a message that starts with """ must end with them: got no end',
    f"{'long ' * 900}": "the prompt must be shorter than the model's context of 4096 tokens: got",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_cannot_be_done_is_one_line_and_changes_nothing(
    line: str, typed: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("other", '{"message": []}'), ("none", '{"messages": []}'), ("text", '{"messages": "A"}')):
        Path(f"{name}.json").write_text(text)
    Path("wrong.json").write_text('{"messages": [{"role": "user"}]}')
    chat = Chat(thinking.pipeline("text"), {"trace": False, "context_limit": None}, Console(stderr=True))
    chat.pipe.name = "the tiny model"
    chat.messages = before = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    typed(line)
    chat.run()
    out, err = capfd.readouterr()
    assert err.startswith("error: ")
    assert WRONG[line] in err
    assert (out, err.count("\n"), chat.messages, chat.images) == ("", 1, before, [])


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["one", "two"], ["one", "two"]),
        (["one\\", "two\\", "three", "four"], ["one\ntwo\nthree", "four"]),
        (["one\\"], ["one\\"]),
        (['"""one', "  two", 'three""" ', "four"], ["one\n  two\nthree", "four"]),
        (['"""', "one", '"""', '"""two"""'], ["one", "two"]),
    ],
)
def test_lines_of_a_message(lines: list[str], messages: list[str], typed: Callable[..., None]) -> None:
    typed(*lines)
    assert [read_message() for _ in messages] == messages
    with pytest.raises(EOFError):
        read_message()


def test_reasoning_is_dim_and_goes_to_the_template(typed: Callable[..., None], monkeypatch: Any, capfd: Any) -> None:
    thinking.script("text", "begun", thinking.ids_of("text", "I ponder.</think>\n\nThis."))
    keywords = {"reasoning": "auto", "chat_template_kwargs": {"mode": "begun"}, "trace": False, "context_limit": None}
    chat = Chat(thinking.pipeline("text"), keywords | {"max_new_tokens": 60}, Console(stderr=True))
    typed("Which?")
    chat.run()
    answer = {"role": "assistant", "content": "This.", "reasoning_content": "I ponder."}
    assert chat.messages == [*thinking.PROMPT, answer]
    out, err = capfd.readouterr()
    assert (out, err.startswith("I ponder.\n\n")) == ("This.\n", True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    chat.take("/reset")
    chat.take("Which?")
    assert capfd.readouterr().out.replace("\x1b[0m\x1b[2m", "") == "\x1b[2mI ponder.\x1b[0m\n\nThis.\n"
    chat.keywords["context_limit"] = limit = counts(err)[0][0] + 3
    chat.take("/reset")
    chat.take("Which?")
    assert f"3 tokens (length, the model's context of {limit})" in capfd.readouterr().err


def test_accepted_drafts_are_underlined(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pipe = mmspec.load("tiny-hybrid")
    pieces = list(pipe.stream(FIRST, trace=True, max_new_tokens=60))
    tokens = [token for piece in pieces for token in piece.token_ids]
    marked = [False]
    for tree in pieces[-1].trees:
        marked += [True] * (len(tree.path) - 1) + [False]
    expected = ""
    for token, drafted in zip(tokens, marked, strict=False):
        text = pipe.processor.decode([token])
        expected += f"\x1b[4m{text}\x1b[0m" if drafted and text else text
    expected = expected.removeprefix(" ")  # of the template
    assert any(marked)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for drafts in (True, False):
        capfd.readouterr()
        Answer(drafts=drafts).read(Console(stderr=True), iter_closing(pieces))
        shown = capfd.readouterr().out
        assert shown == (expected if drafts else re.sub("\x1b.[04]m", "", expected)) + "\n"


def iter_closing(pieces: list[Piece]) -> Iterator[Piece]:
    yield from pieces


@pytest.mark.parametrize("on_terminal", [True, False])
def test_an_answer_controls_no_terminal_and_warnings_follow_it(on_terminal: bool, monkeypatch: Any) -> None:
    ended = []

    def stream(fails: bool) -> Iterator[Piece]:
        try:
            yield Piece("A", [5], parts=[("", "A\a\t\x9b2J")])
            print("late", file=sys.stderr)
            yield Piece("B", [6], "stop", Stats(), parts=[() if fails else ("", "\nB\n")])
        finally:
            ended.append(fails)

    for fails in (False, True):
        shown = io.StringIO()
        monkeypatch.setattr(shown, "isatty", lambda: on_terminal)
        failure = pytest.raises(ValueError, match="unpack") if fails else nullcontext()
        with failure, monkeypatch.context() as patch:
            for name in ("stdout", "stderr"):
                patch.setattr(sys, name, shown)
            Answer().read(Console(file=io.StringIO()), stream(fails))
        text = "A\t2J" if on_terminal else "A\a\t\x9b2J"
        assert shown.getvalue() == text + ("\n" if fails else "\nB\n") + "late\n"
    assert ended == [False, True]


def test_ctrl_c_stops_an_answer_and_twice_the_chat(monkeypatch: Any, capfd: Any, tmp_path: Path) -> None:
    """The partial answer stays in the history; a message without an answer does not, but the images before it do."""
    chat = Chat(thinking.pipeline("text"), {"trace": False, "context_limit": None}, Console(stderr=True))
    chat.images = [image := {"type": "image_url", "image_url": {"url": "data:,"}}]
    requests, path = [], f"C {SCENE}"  # the model reads no images

    def stream(messages: Any, **keywords: Any) -> Iterator[Piece]:
        requests.append(messages)
        if len(requests) > 1:
            yield Piece("Half an", [5, 6, 7], parts=[("", "Half"), ("", " an"), ("", "")])
        raise KeyboardInterrupt

    stop = KeyboardInterrupt
    events: Iterator[Any] = iter(["A", "B", "unsent", path, "/reset", stop, "/d/e", stop, "E"])

    def line() -> str:
        text = next(events, None)
        if text is None:
            raise EOFError
        chat.images += [image] * (text == "/reset")
        monkeypatch.setattr(module, "_typed", lambda: "unsent" if text == "unsent" else "")
        if text in ("unsent", stop):
            raise KeyboardInterrupt
        return str(text)

    monkeypatch.setattr(chat.pipe, "stream", stream)
    monkeypatch.setattr(module, "read_message", line)
    chat.run()
    half = {"role": "assistant", "content": "Half an"}
    contents = [*([image, {"type": "text", "text": text}] for text in "AB"), path, "/d/e"]
    asked = [{"role": "user", "content": content} for content in contents]
    assert requests == [asked[:1], asked[1:2], [asked[1], half, asked[2]], asked[3:]]
    assert chat.messages == [asked[3], half]
    assert next(events) == "E"
    chat.take(f"/save {tmp_path / 'chat.json'}")
    chat.take("/reset")
    chat.images = [image]
    chat.take(f"/load {tmp_path / 'chat.json'}")
    assert (chat.messages, chat.images) == ([asked[3], half], [])
    out, err = capfd.readouterr()
    assert out == "Half an\n" * 3
    notes = re.findall(r"stopped: (?:the message|3 tokens)|Ctrl-C again", err)
    assert notes == ["stopped: the message", *["stopped: 3 tokens"] * 2, "Ctrl-C again", "stopped: 3 tokens"]


def test_refused_before_a_model_is_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert_user_error(run("tiny-hybrid"), "a chat reads messages from standard input, which is closed")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_user_error(run("tiny-hybrid"), "a chat runs in one process: got one of 2 ranks of a job")


def test_options_of_answers_and_templates(run: Run, monkeypatch: Any, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("mmspec.cli.session.fix_threads", seen.append)
    monkeypatch.setattr(Chat, "run", lambda chat: seen.append(chat.keywords))
    options = ("--chat-template-kwargs", '{"a": 1}', "--reasoning-parser", "none", "--generation-config", "mmspec")
    assert run("tiny-hybrid", "--threads", "3", "--show-drafts", *options)[0] == 0
    threads, keywords = seen
    expected = {"trace": True, "chat_template_kwargs": {"a": 1}, "reasoning": "none", "max_new_tokens": 4096}
    assert (threads, keywords | expected) == (3, keywords)
    assert run(str(save_gguf(tmp_path / "a.gguf")), "--temperature", "0.3")[0] == 0
    assert (seen[-1]["temperature"], seen[-1]["top_k"]) == (0.3, 40)  # of the file if not given


@pytest.mark.long
def test_on_a_terminal(tmp_path: Path) -> None:
    """Edited and pasted lines, characters of several bytes, Ctrl-C in an answer, on a line and without one."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8", "COLUMNS": "80"}
    command = [sys.executable, "-m", "mmspec", "chat", "tiny-hybrid", "--ignore-eos", "--max-new-tokens", "4000"]
    ends: dict[str, Any] = {"stdin": follower, "stdout": follower, "stderr": follower, "start_new_session": True}
    ends["preexec_fn"] = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C goes to the terminal's own processes
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **ends)
    os.close(follower)

    def until(pattern: str) -> str:
        text = b""
        while not re.search(pattern.encode(), text):
            assert select.select([leader], [], [], 60)[0], text
            text += os.read(leader, 65536)
        return text.decode(errors="replace")

    def send(text: str, pattern: str = r">>> $") -> str:
        time.sleep(0.5)  # a Ctrl-C between readline's echo and its wait for a key takes effect at the next key
        os.write(leader, text.encode())
        return until(pattern)

    answering = r"2K[^\x1b][\s\S]* \w+ "  # after the status line
    try:
        until(r">>> $")
        send("Grüße 你好x\x7f\r", answering)
        stopped = send("\x03")
        assert re.search(r"stopped: [1-9]\d* tokens are kept", stopped)
        send("unsent", "unsent")
        assert "again" not in send("\x03")
        send("\x1b[200~one\rtwo\x1b[201~", "two")
        send("\r", answering)
        send("\x03")
        assert "messages in" in send("/save chat.json\r", r"in chat.json[\s\S]*>>> $")
        assert "Ctrl-C again" in send("\x03", r"again[\s\S]*>>> $")
        time.sleep(0.5)
        os.write(leader, b"\x03")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [one["content"] for one in messages[::2]] == ["Grüße 你好", "one\ntwo"]
    assert all(one["content"] for one in messages[1::2])


def test_a_message_is_text(typed: Callable[..., None], monkeypatch: Any, capfd: Any) -> None:
    """Names of special tokens in messages are no special tokens. Failing files end a chat, other failures do not."""
    pipe = thinking.pipeline("text")
    chat = Chat(pipe, {"trace": False, "context_limit": None}, Console(stderr=True))
    seen = []
    monkeypatch.setattr(
        pipe.engine, "submit", lambda request, *_: seen.append(request) or (os.close(-1) if len(seen) > 1 else 1 / 0)
    )
    typed("</s>", "again", "never")
    with pytest.raises(OSError, match="Bad file descriptor"):
        chat.run()
    assert "internal error: ZeroDivisionError: division by zero" in capfd.readouterr().err
    assert (len(seen), sys.stdin.read(), chat.messages) == (2, "never\n", [])
    ids = seen[0].prompt.input_ids[0].tolist()
    assert ids.count(thinking.END) == 1


def test_commands_on_a_terminal_whose_output_goes_to_a_file(typed: Any, monkeypatch: Any, capfd: Any) -> None:
    typed("/help", '"""', '"""', "/exit", "never")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    pipe = thinking.pipeline("text")
    Chat(pipe, {}, Console(stderr=True)).run()
    out, err = capfd.readouterr()
    shown = "".join(f"{f'{name} {words}':15} {text}\n" for name, (words, text) in module._COMMANDS.items())
    assert (out, sys.stdin.read()) == ("", "never\n")
    assert err == f"{pipe.name}, drafter none; /help lists commands\n>>> {shown}>>> ... >>> \n"
