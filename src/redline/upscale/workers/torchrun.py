"""Under torchrun the ranks are the workers: rank 0 gives out the work and the others, on any machine, ask it for more.

They find each other through the store that torchrun keeps at MASTER_ADDR: rank 0 puts its port there, and a key
without which nobody is let in. From then on a rank is a worker like any other: it proposes a tile, gets files and parts
of pictures, and is missed when it is gone. All machines must see the same files under the same paths.
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
from redline.upscale.workers.worker import Gone, serve

# Ranks may begin at very different times: a machine may have to read torch over its network.
_PATIENCE_S = 300.0


@dataclass(frozen=True)
class Rank:
    """This process among those that torchrun started; `attempt` counts torchrun's restarts."""

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
        """None when torchrun did not start this process, or nothing beside it."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")
        if any(name not in environment for name in names) or environment["WORLD_SIZE"] == "1":
            return None
        try:
            index, count, local, port = (int(environment[name]) for name in names[:4])
            local_count = int(environment.get("LOCAL_WORLD_SIZE", "1"))
        except ValueError as error:
            raise RedlineError(f"what torchrun says in {', '.join(names[:4])} is not a number: {error}.") from error
        return cls(
            index,
            count,
            local,
            local_count,
            environment["MASTER_ADDR"],
            port,
            environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    def device(self, asked: str) -> tuple[str, int]:
        """The device of this rank, and how many ranks share its memory."""
        device = resolve_device(asked)
        if device == "cpu" or asked not in ("auto", "cuda"):
            return device, self.local_count
        gpus = torch.cuda.device_count()
        own = self.local % gpus
        return f"cuda:{own}", len(range(own, self.local_count, gpus))

    def store(self) -> Any:
        """torchrun keeps one on its first machine; where the ranks were started otherwise, rank 0 does."""
        if not torch.distributed.is_available():
            raise RedlineError("this torch was built without torch.distributed, through which ranks find each other.")
        hosts = self.index == 0 and not self.agent_has_store
        patience = timedelta(seconds=_PATIENCE_S)
        try:
            return torch.distributed.TCPStore(self.address, self.port, None, hosts, patience, wait_for_workers=False)
        except (RuntimeError, OSError) as error:
            raise RedlineError(f"rank {self.index} finds no store at {self.address}:{self.port}.") from error

    @property
    def key(self) -> str:
        return f"redline/upscale/{self.attempt}"


def gather(rank: Rank, device: str) -> Crew:
    """On rank 0: all ranks as a crew; its own share is done by a process of its own, so that it can always answer."""
    signal.signal(signal.SIGTERM, _interrupt)
    secret = secrets.token_bytes(32)
    crew = Crew([])
    deadline = time.monotonic() + _PATIENCE_S
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
                    raise RedlineError(f"only {there} came together within {_PATIENCE_S:.0f} s.") from None
                try:
                    deliver_challenge(connection, secret)
                    answer_challenge(connection, secret)
                    crew.members.append(Member(f"rank {connection.recv()}", connection))
                except (AuthenticationError, EOFError, OSError):
                    connection.close()  # a stranger
        except BaseException as error:
            crew.__exit__(type(error))
            raise
    return crew


def work_as(rank: Rank, device: str) -> None:
    """On every other rank: works for rank 0 until it hangs up."""
    try:
        place = json.loads(rank.store().get(rank.key))
        connection = _connection(socket.create_connection((rank.address, place["port"]), _PATIENCE_S))
        answer_challenge(connection, bytes.fromhex(place["secret"]))
        deliver_challenge(connection, bytes.fromhex(place["secret"]))
        connection.send(rank.index)
    except (RuntimeError, AuthenticationError, EOFError, OSError) as error:
        raise RedlineError(f"rank {rank.index} could not reach rank 0 at {rank.address}.") from error
    try:
        serve(connection, *rank.device(device))
    except (Gone, KeyboardInterrupt):
        return


def _connection(link: socket.socket) -> Connection:
    """A machine that lost its power says nothing: after some silence it is asked whether it is still there."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Connection(link.detach())


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
