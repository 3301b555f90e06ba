"""Sessions: conversations that go on from a stored state, without their history being sent again."""

import os
import random
import time
from pathlib import Path

import pytest
import torch

from redline.errors import RedlineError
from redline.generation import Engine, Request
from redline.generation.request import Finish
from redline.models.memory import TitanModel

from .test_continuous import run, tokens_of


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(101), k=length)


@pytest.mark.parametrize("behind", [0, 1])
def test_a_session_goes_on_after_a_restart_as_if_its_history_had_been_sent(
    behind: int, memory_model: TitanModel, tmp_path: Path
) -> None:
    model, history = memory_model.double(), []
    for turn in range(4):
        engine = Engine(model, session_folder=tmp_path, behind=behind, chunk=10)
        prompt = prompt_of(5 + 9 * turn, turn)
        found = run(engine, [Request("a", prompt, 7, session="me"), Request("b", prompt_of(30, 99), 20)])
        whole = run(Engine(model), [Request("a", [*history, *prompt], 7)])
        assert tokens_of(found["a"]) == tokens_of(whole["a"])
        history += [*prompt, *tokens_of(found["a"])]
        engine.close()


def test_a_stop_token_is_not_part_of_the_state(memory_model: TitanModel, tmp_path: Path) -> None:
    model, prompt = memory_model.double(), prompt_of(9, 0)
    engine = Engine(model, session_folder=tmp_path)
    free = tokens_of(run(engine, [Request("0", prompt, 20)])["0"])
    stop = next(token for token in free[3:] if token not in free[:3])
    first = run(engine, [Request("0", prompt, 20, session="s", stop_tokens=frozenset({stop}))])["0"]
    assert first[-1].finish == Finish.STOP
    second = tokens_of(run(engine, [Request("1", [5, 6], 8, session="s")])["1"])
    expected = run(Engine(model), [Request("1", [*prompt, *tokens_of(first), 5, 6], 8)])["1"]
    assert second == tokens_of(expected)


def test_sessions_belong_to_their_salt_and_can_be_deleted(memory_model: TitanModel, tmp_path: Path) -> None:
    engine = Engine(memory_model.double(), session_folder=tmp_path)

    def said(salt: str, name: str = "../../me") -> list[int]:
        return tokens_of(run(engine, [Request("0", [1, 2, 3], 9, salt=salt, session=name)])["0"])

    fresh = said("alice")
    assert said("bob") == fresh and said("alice") != fresh
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 2 and all(len(path.stem) == 64 for path in files)
    assert engine.delete_session("bob", "../../me") and not engine.delete_session("bob", "../../me")
    assert said("bob") == fresh


def test_a_session_in_use_is_refused_and_an_aborted_one_stays_as_it_was(
    memory_model: TitanModel, tmp_path: Path
) -> None:
    engine = Engine(memory_model.double(), session_folder=tmp_path)
    run(engine, [Request("0", [1, 2, 3], 5, session="s")])
    (before,) = (path.read_bytes() for path in tmp_path.rglob("*.safetensors"))
    engine.submit(Request("1", [4, 5], 50, session="s"))
    with pytest.raises(RedlineError, match="the session 's' is in use by another request: wait until it has ended"):
        engine.submit(Request("2", [4, 5], 5, session="s"))
    with pytest.raises(RedlineError, match="is in use by a request"):
        engine.delete_session("", "s")
    engine.step(), engine.step()
    engine.abort("1")
    engine.step()
    (after,) = (path.read_bytes() for path in tmp_path.rglob("*.safetensors"))
    assert after == before
    assert run(engine, [Request("2", [4, 5], 5, session="s")])["2"][-1].finish == Finish.LENGTH


def test_the_sessions_not_used_for_longest_are_deleted(memory_model: TitanModel, tmp_path: Path) -> None:
    engine, files, begun = Engine(memory_model, session_folder=tmp_path), [], time.time() - 1000
    for number in range(4):
        run(engine, [Request("0", [1, 2], 2, session=str(number))])
        files += set(tmp_path.rglob("*.safetensors")) - set(files)
        os.utime(files[-1], (begun + number, begun + number))
    run(engine, [Request("0", [1, 2], 2, session="0")])  # used again
    size = files[0].stat().st_size
    limited = Engine(memory_model, session_folder=tmp_path, session_bytes=2 * size + 10)
    assert [path.exists() for path in files] == [True, False, False, True]
    run(limited, [Request("0", [1, 2], 2, session="new")])
    assert [path.exists() for path in files] == [True, False, False, False]
    Engine(memory_model, session_folder=tmp_path, session_age_s=1e-6)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_full_disk_is_an_error_of_the_request_and_its_text_is_kept(
    memory_model: TitanModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    engine = Engine(memory_model, session_folder=tmp_path)
    monkeypatch.setattr(os, "replace", full)
    outputs = run(engine, [Request("0", [1, 2], 4, session="s")])["0"]
    assert len(tokens_of(outputs)) == 4 and outputs[-1].finish == Finish.LENGTH
    assert outputs[-1].error == "the session could not be stored: No space left on device."
    assert not [path for path in tmp_path.rglob("*") if path.is_file()] and not engine.has_work


def test_a_damaged_file_is_refused_and_the_engine_goes_on(memory_model: TitanModel, tmp_path: Path) -> None:
    engine = Engine(memory_model, session_folder=tmp_path)
    run(engine, [Request("0", [1, 2], 4, session="s")])
    next(tmp_path.rglob("*.safetensors")).write_bytes(b"nothing")
    with pytest.raises(RedlineError):
        engine.submit(Request("0", [1, 2], 4, session="s"))
    assert not engine.has_work and torch.is_tensor(engine.new_state().position_B)
    engine.delete_session("", "s")
    assert run(engine, [Request("0", [1, 2], 4, session="s")])["0"][-1].finish == Finish.LENGTH


def test_sessions_need_a_folder(memory_model: TitanModel) -> None:
    with pytest.raises(RedlineError, match="this engine stores no sessions: give it a folder"):
        Engine(memory_model).submit(Request("0", [1], 4, session="s"))
