"""Shared by the tests of the profile: a subject built from a tiny workload, on the CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest

from redline.ladder.plan import Plan
from redline.ladder.profile.subject import Subject, prepare
from redline.ladder.workload import Workload
from redline.ladder.workloads.addresses import load_workload
from redline.machine.machine import Machine

WORKLOADS = Path(__file__).with_name("profile_workloads.py")


@pytest.fixture(scope="session")
def machine() -> Machine:
    return Machine.detect("cpu")


@pytest.fixture(scope="session")
def workload() -> Callable[..., Workload]:
    def load(name: str, **options: object) -> Workload:
        return load_workload(f"{WORKLOADS}:{name}", options)

    return load


@pytest.fixture(scope="session")
def subject(machine: Machine, workload: Callable[..., Workload]) -> Callable[..., Subject]:
    def build(name: str, plan: str = "", device: str = "cpu", **options: object) -> Subject:
        where = machine if device == "cpu" else Machine.detect(device)
        return prepare(workload(name, **options), Plan.parse(plan), where)

    return build
