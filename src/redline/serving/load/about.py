"""What a result needs to be understood later: the client's machine, the server, versions and the command."""

import asyncio
import os
import platform
import subprocess
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

import aiohttp

from redline.errors import RedlineError, first_line
from redline.machine.cores import cores, proc_field
from redline.machine.version import VERSION
from redline.serving.load.client import Target

_TIMEOUT_S = 30.0
_LONGEST_LIST = 1000


class _NotThere(RedlineError):
    """The server does not have this path."""


async def find_model(target: Target) -> str:
    """Returns the target's model, or the first of the server if the target has none.

    Raises if the server cannot be reached, or if it lists models, but not the target's model.
    """
    try:
        listed = await _get(target, "/v1/models")
    except _NotThere:
        if not target.model:
            raise
        return target.model
    models = listed.get("data") if isinstance(listed, Mapping) else None
    found = [model.get("id") for model in models or () if isinstance(model, Mapping)]
    names = [name for name in found if isinstance(name, str)]
    if target.model:
        if names and target.model not in names:
            listing = shorten(", ".join(map(repr, names)), _LONGEST_LIST)
            raise RedlineError(f"{target.url} has no model {target.model!r}: it lists {listing}.")
        return target.model
    if not names:
        raise RedlineError(f"{target.url}/v1/models lists no model: give its name with --model.")
    return names[0]


async def describe_server(target: Target) -> dict[str, Any]:
    """Returns what the server says about itself. Servers of Redline and vLLM have the path /version."""
    found: dict[str, Any] = {"url": target.url, "model": target.model}
    try:
        found["version"] = await _get(target, "/version")
    except RedlineError:
        found["version"] = None
    return found


async def _get(target: Target, path: str) -> Any:
    where = f"{target.url}{path}"
    try:
        async with target.session() as session, asyncio.timeout(_TIMEOUT_S), session.get(where) as response:
            if response.status in (401, 403):
                raise RedlineError(
                    f"{where} answers {response.status}: give the server's key in REDLINE_API_KEY or --api-key-file."
                )
            if response.status != 200:
                kind = _NotThere if response.status in (404, 405, 501) else RedlineError
                raise kind(f"{where} answers {response.status}: is this an OpenAI-compatible server?")
            return await response.json(content_type=None)
    except TimeoutError as error:
        raise RedlineError(f"{where} does not answer within {_TIMEOUT_S:g} s.") from error
    except (aiohttp.ClientError, OSError) as error:
        raise RedlineError(f"cannot reach {where}: {_reason(error)}.") from error
    except ValueError as error:
        raise RedlineError(f"{where} does not answer with JSON: is this an OpenAI-compatible server?") from error


def _reason(error: Exception) -> str:
    # The text of a connection error repeats the address.
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number).lower() if number else first_line(error)


def describe_client(command: str) -> dict[str, Any]:
    """Returns the machine and the versions. Does not import torch, so that a run starts at once."""
    return {
        "machine": {
            "cpu": proc_field("cpuinfo", "model name") or platform.processor() or platform.machine(),
            "cores": cores(),
            "system": f"{platform.system()} {platform.machine()}",
            "gpus": _gpus(),
        },
        "versions": {"redline": VERSION, "aiohttp": aiohttp.__version__, "python": platform.python_version()},
        "command": command,
    }


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
