"""The exceptions of Redline: all derive from `RedlineError`, and their messages are single sentences."""


class RedlineError(Exception):
    """Invalid input or an unsupported request. The command line prints the message, and exits with status 2."""


class WorkloadError(RedlineError):
    """A workload that cannot be imported, built or evaluated."""


class RungError(RedlineError):
    """An unknown rung or option, or a rung that cannot be applied."""


class PlanError(RedlineError):
    """A plan that cannot be parsed, repeats a rung, or has its rungs in an invalid order."""


class GateError(RedlineError):
    """An unknown metric, or outputs that cannot be compared."""


class MeasurementError(RedlineError):
    """A measurement file that is damaged, empty, or of a newer schema."""


class MachineError(RedlineError):
    """A missing device, or a comparison between different machines."""


class ModelError(RedlineError):
    """Weights that cannot be read or belong to another model, or an input that a model does not support."""


class Refused(RedlineError):
    """A plan that ran but was rejected, because it had no effect or changed the structure of the output."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message without its full stop; the name of its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
