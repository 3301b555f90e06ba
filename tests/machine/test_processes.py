"""A child process answers, times out, or ends, and takes its own children with it."""

import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from redline.machine.processes import Child, ChildExited, ChildTimeout, start_module

SCRIPT = """
import os, subprocess, sys, time
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[1]))
while True:
    request = connection.recv()
    if request == "fork":
        connection.send(subprocess.Popen(["sleep", "600"]).pid)
    elif request == "hang":
        time.sleep(600)
    elif request == "exit":
        sys.exit("no more work")
    else:
        os.kill(os.getpid(), request)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    (tmp_path / "answering.py").write_text(SCRIPT)
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        channel, process = start_module("answering", environment=environment, stderr=stderr)
    return Child("the child", Connection(channel.detach()), process, log)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_stop_also_ends_the_processes_that_the_child_started(child: Child) -> None:
    grandchild = child.request("fork", 30)
    assert is_running(grandchild)
    assert child.stop() == -9
    deadline = time.monotonic() + 10
    while is_running(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(grandchild)
    assert child.stop() == -9, "a second stop does nothing"


def test_a_timeout_ends_the_child(child: Child) -> None:
    with pytest.raises(ChildTimeout, match="no result within 1 s"):
        child.request("hang", 1)
    assert child.process is not None and child.process.poll() == -9


@pytest.mark.parametrize(
    ("request_", "message", "code"),
    [
        ("exit", "the child ended with exit code 1: no more work", 1),
        (9, "the child died of SIGKILL \\(out of memory\\?\\)", -9),
        (11, "the child died of SIGSEGV", -11),
    ],
)
def test_the_error_says_how_the_child_ended(child: Child, request_: object, message: str, code: int) -> None:
    with pytest.raises(ChildExited, match=message) as error:
        child.request(request_, 30)
    assert error.value.code == code


def test_importing_the_module_does_not_import_torch() -> None:
    script = "import sys, redline.machine.processes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
