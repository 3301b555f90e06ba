"""What the handlers of a server share."""

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
    """`draining` is set when the server ends: running requests are answered, and new ones refused."""

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
        """Redline's own engine. Requests that another server answers do not need it."""
        assert isinstance(self.backend, EngineProcess)
        return self.backend

    def admit(self, caller: Caller, requests: int) -> Ticket:
        """Returns the ticket of a request, or raises 429 or 503."""
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
    """What the checks found out about a request. `id` is what the client sent as X-Request-Id, or a new one."""

    id: str
    caller: Caller = ANYONE
    body: bytes = b""


SERVICES = web.AppKey("services", Services)
CALL = web.RequestKey("call", Call)
