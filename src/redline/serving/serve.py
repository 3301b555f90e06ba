"""Implements `redline.serve`, which starts a server for the model in a folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.generation.folder import find_model
from redline.serving.keys import read_keys
from redline.serving.limits import Limits
from redline.serving.server import EngineSource, Server, UpstreamSource
from redline.serving.upstream_process import vllm_command

ENGINES = ("redline", "vllm")
# The factory is a string, because importing its module would import torch, which only the engine process needs.
MODEL_ENGINE = "redline.serving.model_engine:load_engine"


def serve(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    api_keys: str | Path | None = None,
    name: str | None = None,
    engine: str = "redline",
    vllm_python: str | None = None,
    vllm_options: tuple[str, ...] = (),
    limits: Limits | None = None,
    on_progress: Callable[[str], object] = lambda text: None,
    **options: Any,
) -> Server:
    """Starts an OpenAI-compatible server, and returns it when the model is loaded.

    The server runs until `close` is called or its `with` block ends. Its attribute `url` is its address. `port` 0
    selects a free port. API keys are read from `api_key`, from the file `api_keys` (one per line, or NAME = KEY) and
    from the variable REDLINE_API_KEYS. Without a key, the server can listen only on a loopback address. `name` is the
    model's name in the API (default: the name of its folder). `options` are those of the engine, such as device,
    precision, plan and max_rows. With `engine="vllm"`, vLLM generates the texts: `vllm_python` is the interpreter that
    has vLLM, and `vllm_options` are passed to vLLM's server.

    For example::

        with redline.serve("my-model", port=0) as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    """
    if engine not in ENGINES:
        raise RedlineError(f"unknown engine {engine!r} (known: {', '.join(ENGINES)}).")
    folder = find_model(model)
    shown = name or _name_of(model, folder)
    given = {key: value for key, value in options.items() if value is not None}
    source: EngineSource | UpstreamSource
    if engine == "vllm":
        if given:
            raise RedlineError(f"the engine vllm does not take {', '.join(given)}: pass options of vLLM itself.")
        source = UpstreamSource("vLLM", vllm_command(folder, shown, vllm_python, vllm_options))
    else:
        if vllm_python is not None or vllm_options:
            raise RedlineError("options of vLLM need the engine vllm.")
        source = EngineSource(MODEL_ENGINE, {"model": str(folder), **given})
    keys = read_keys(api_key, None if api_keys is None else Path(api_keys))
    made = Server(folder, source, name=shown, host=host, port=port, keys=keys, limits=limits, on_progress=on_progress)
    return made.start()


def _name_of(model: str | Path, folder: Path) -> str:
    """Returns the given name if the model is in the Hugging Face cache, otherwise the name of the model's folder."""
    return str(model) if Path(model) != folder else folder.resolve().name
