"""Upscaling under torchrun: the ranks are the workers, and rank 0 hands out the tasks.

The ranks find each other through the store that torchrun runs at MASTER_ADDR, where rank 0 puts its port and a secret
key. After that a rank is a worker like any other. All machines must have the same files at the same paths.
"""

import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import torch

from redline.errors import RedlineError
from redline.machine.machine import resolve_device
from redline.upscale.workers.crew import Crew, Member, start_member
from redline.upscale.workers.worker import ParentGone, serve

# Ranks may start at very different times, for example if a machine loads torch from a network drive.
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Rank:
    """The rank of this process under torchrun; `attempt` counts the restarts."""

    index: int
    count: int
    local: int
    local_count: int
    address: str
    port: int
    attempt: str = "0"
    agent_has_store: bool = False

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> "Rank | None":
        """Returns None if torchrun did not start this process, or started only this one."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "LOCAL_WORLD_SIZE")
        given = {"LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0", **environment}
        if any(name not in given for name in (*names, "MASTER_ADDR")) or given["WORLD_SIZE"] == "1":
            return None
        try:
            index, count, local, port, local_count = (int(given[name]) for name in names)
        except ValueError as error:
            variables = f"one of the environment variables {', '.join(names)}"
            raise RedlineError(f"{variables} is not a number: {error}.") from error
        has_store = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = given["TORCHELASTIC_RESTART_COUNT"]
        return cls(index, count, local, local_count, given["MASTER_ADDR"], port, attempt, has_store)

    def device(self, asked: str) -> tuple[str, int]:
        """Returns the device of this rank, and how many ranks share its memory."""
        device = resolve_device(asked)
        if device == "cpu" or asked not in ("auto", "cuda"):
            return device, self.local_count
        gpus = torch.cuda.device_count()
        own = self.local % gpus
        return f"cuda:{own}", len(range(own, self.local_count, gpus))

    def store(self) -> Any:
        """Connects to the store, which runs in torchrun's agent or, if the agent has none, in rank 0."""
        if not torch.distributed.is_available():
            raise RedlineError("this torch has no torch.distributed, which the ranks need: install another build.")
        is_host = self.index == 0 and not self.agent_has_store
        timeout = timedelta(seconds=_TIMEOUT_S)
        try:
            return torch.distributed.TCPStore(self.address, self.port, None, is_host, timeout, wait_for_workers=False)
        except (RuntimeError, OSError) as error:
            place = f"{self.address}:{self.port}"
            raise RedlineError(f"rank {self.index} cannot connect to the torchrun store at {place}.") from error

    @property
    def key(self) -> str:
        return f"redline/upscale/{self.attempt}"


def gather(rank: Rank, device: str) -> Crew:
    """Called on rank 0: returns all ranks as a crew.

    The work of rank 0 runs in a child process, so that rank 0 can always answer the others.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    secret = secrets.token_bytes(32)
    crew = Crew([])
    deadline = time.monotonic() + _TIMEOUT_S
    with socket.create_server(("", 0), backlog=rank.count) as server:
        store = rank.store()
        store.set(rank.key, json.dumps({"port": server.getsockname()[1], "secret": secret.hex()}))
        try:
            own, sharing = rank.device(device)
            crew.members.append(start_member("rank 0", own, sharing, rank.local_count))
            while len(crew) < rank.count:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    connection = _connection(server.accept()[0])
                except TimeoutError:
                    there = f"{len(crew)} of {rank.count} ranks"
                    raise RedlineError(f"only {there} connected within {_TIMEOUT_S:.0f} s.") from None
                try:
                    deliver_challenge(connection, secret)
                    answer_challenge(connection, secret)
                    crew.members.append(Member(f"rank {connection.recv()}", connection))
                except (AuthenticationError, EOFError, OSError):
                    connection.close()  # the process that connected does not have the secret key
        except BaseException as error:
            crew.__exit__(type(error))
            raise
    return crew


def work_as(rank: Rank, device: str) -> None:
    """Called on every other rank: works for rank 0 until rank 0 closes the connection."""
    try:
        parent = json.loads(rank.store().get(rank.key))
        connection = _connection(socket.create_connection((rank.address, parent["port"]), _TIMEOUT_S))
        answer_challenge(connection, bytes.fromhex(parent["secret"]))
        deliver_challenge(connection, bytes.fromhex(parent["secret"]))
        connection.send(rank.index)
    except (RuntimeError, AuthenticationError, EOFError, OSError) as error:
        raise RedlineError(f"rank {rank.index} cannot connect to rank 0 at {rank.address}.") from error
    try:
        serve(connection, *rank.device(device))
    except (ParentGone, KeyboardInterrupt):
        return


def _connection(peer: socket.socket) -> Connection:
    """Wraps the socket in a Connection, with TCP keep-alive, which detects a machine that lost power."""
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Connection(peer.detach())
