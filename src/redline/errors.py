"""The one exception tree: everything Redline raises on purpose is a `RedlineError` whose text is one sentence."""


class RedlineError(Exception):
    """Bad input or an impossible request; the command line prints it and exits with 2."""


class WorkloadError(RedlineError):
    """The workload does not import, does not build, or cannot be judged."""


class RungError(RedlineError):
    """An unknown rung or option, or a rung that cannot do what it was asked."""


class PlanError(RedlineError):
    """A plan that does not parse, repeats a rung, or puts rungs in an impossible order."""


class GateError(RedlineError):
    """An unknown metric, or outputs that cannot be compared."""


class MeasurementError(RedlineError):
    """A measurement file that is damaged, empty, or of a newer schema."""


class MachineError(RedlineError):
    """A device that is not there, or a comparison between different machines."""


class ModelError(RedlineError):
    """Weights that cannot be read or belong to another model, or an input of a size that a model cannot take."""


class Refused(RedlineError):
    """The plan ran, but what it did cannot be accepted (nothing happened, an output of another form)."""
