"""Defines the objects that the request handlers of a server share."""

from dataclasses import dataclass, field

from aiohttp import web

from redline.serving.admission import Admission, Ticket
from redline.serving.engine_process import EngineProcess
from redline.serving.errors import unavailable
from redline.serving.keys import ANYONE, Caller, Keys
from redline.serving.limits import Limits
from redline.serving.metrics import Metrics, ServerState
from redline.serving.reading import BodyReader
from redline.serving.served_model import ServedModel
from redline.serving.supervised_process import SupervisedProcess


@dataclass
class Services:
    """Holds what all request handlers of a server use.

    `draining` is set when the server shuts down: running requests are still answered, but new ones are refused.
    """

    model: ServedModel
    backend: SupervisedProcess
    keys: Keys
    limits: Limits
    admission: Admission = field(init=False)
    metrics: Metrics = field(init=False)
    reader: BodyReader = field(init=False)
    draining: bool = False

    def __post_init__(self) -> None:
        self.admission = Admission(self.limits)
        self.metrics = Metrics(self.model.name)
        self.reader = BodyReader(self.limits)
        self.metrics.watch(self._state)

    @property
    def engine(self) -> EngineProcess:
        """Redline's own engine. Must not be used if another server generates the texts."""
        assert isinstance(self.backend, EngineProcess)
        return self.backend

    def admit(self, caller: Caller, requests: int) -> Ticket:
        """Returns the ticket of a request that asks for `requests` texts. Raises 429 or 503 if it is refused."""
        self.check_ready()
        return self.admission.admit(caller, requests)

    def check_ready(self) -> None:
        """Raises 503 unless a request can run now."""
        if self.draining:
            raise unavailable("The server is shutting down.", "shutting_down")
        self.backend.check_ready()

    def _state(self) -> ServerState:
        admission, backend = self.admission, self.backend
        return ServerState(backend.stats, admission.waiting, admission.running, backend.restarts)


@dataclass
class Call:
    """Holds what the middlewares read from a request.

    `id` is the header X-Request-Id of the request, or a random one if the header is missing or invalid.
    """

    id: str
    caller: Caller = ANYONE
    body: bytes = b""


SERVICES = web.AppKey("services", Services)
CALL = web.RequestKey("call", Call)
