"""Loads an artifact in a new process, as a user would, so that its load time is measured and its outputs are judged.

The new process runs `python -m redline.ladder.exports.fresh_process FD ARTIFACT`, where FD is the file descriptor of
its connection.
"""

import pickle
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_TIMEOUT_S = 1800.0


class LoadFailed(Exception):
    """The new process could not load or run the artifact; the message says why."""


class FreshProcess:
    """The artifact in a new process, called like the model.

    `load_s` is the time from the start of the process to the first output.
    """

    def __init__(self, child: Any, started_s: float) -> None:
        self._child, self._started_s = child, started_s
        self.load_s = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        from redline.machine.processes import ChildExited, ChildTimeout
        from redline.machine.trees import tree_map_only

        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.cpu, (args, kwargs))
        try:
            # Calls `pickle` itself, because a connection would send tensors as shared memory, which disappears when the
            # sending process ends.
            answer = pickle.loads(self._child.request(pickle.dumps((args, kwargs)), _TIMEOUT_S))
        except (ChildExited, ChildTimeout) as error:
            raise LoadFailed(str(error)) from error
        self.load_s = self.load_s or time.perf_counter() - self._started_s
        if "error" in answer:
            raise LoadFailed(answer["error"])
        return answer["output"]


@contextmanager
def fresh_process(artifact: Path, scratch: Path, environment: Mapping[str, str]) -> Iterator[FreshProcess]:
    """Starts a process that loads the artifact; `scratch` is a folder for its log."""
    from redline.machine.processes import Child, start_module

    log_path = scratch / "fresh-process.log"
    with log_path.open("wb") as log:
        started_s = time.perf_counter()
        ours, process = start_module(__name__, str(artifact), environment=environment, stdout=log, stderr=log)
    child = Child("the process that loads the artifact", Connection(ours.detach()), process, log_path)
    try:
        yield FreshProcess(child, started_s)
    finally:
        child.stop()


def main() -> None:
    connection, artifact = Connection(int(sys.argv[1])), sys.argv[2]
    import torch

    from redline.errors import RedlineError
    from redline.ladder.exports.load import load_exported
    from redline.ladder.rewrites.sample_run import on_device
    from redline.machine.trees import tree_map_only

    model, home = None, torch.device("cpu")
    while True:
        try:
            args, kwargs = pickle.loads(connection.recv())
        except (EOFError, OSError):
            return
        try:
            if model is None:
                model = load_exported(artifact)
                home = torch.device("cpu" if model.manifest.host_inputs else model.manifest.device)
            args, kwargs = on_device((args, kwargs), home)
            output = model(*args, **kwargs)
            answer = {"output": tree_map_only(torch.Tensor, lambda leaf: leaf.detach().cpu().clone(), output)}
        except Exception as error:  # reported by the parent
            text = str(error) if isinstance(error, RedlineError) else f"{type(error).__name__}: {error}"
            answer = {"error": text.strip().splitlines()[0].rstrip(".") if text.strip() else type(error).__name__}
        connection.send(pickle.dumps(answer))


if __name__ == "__main__":
    main()
