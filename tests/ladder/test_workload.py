"""A workload with a stricter limit on its error."""

import torch
from torch import nn

from redline.ladder.gate import Gate
from redline.ladder.workload import Workload


def test_a_maximum_error_lowers_the_limit_of_the_first_error_metric() -> None:
    gates = (Gate("agreement", 0.9), Gate("max_error", 0.1), Gate("relative_error", 0.1))
    workload = Workload(build=lambda: nn.Linear(2, 2), inputs=lambda seed: torch.ones(1, 2), gates=gates)
    for given, expected in ((0.05, 0.05), (0.5, 0.1)):
        assert workload.with_max_error(given).gates == (gates[0], Gate("max_error", expected), gates[2])
    assert workload.with_max_error(0) is workload

    only = Workload(build=workload.build, inputs=workload.inputs, gates=gates[:1])
    assert only.with_max_error(0.05) is only
