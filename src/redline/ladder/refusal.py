"""Why a plan that ran is not accepted: raised where it is seen, by a gate or by a rung's own proof."""

from redline.errors import RedlineError


class Refused(RedlineError):
    """The plan ran, but what it did cannot be accepted (nothing happened, an output of another form)."""
