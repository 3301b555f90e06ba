"""Leaves out the compilation of artifacts, which takes 30 CPU s: a stand-in runs the exported program instead."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import redline
from redline.ladder.exports import ahead_of_time
from redline.ladder.rungs.compile import Compile


class StandIn:
    """Runs the exported program of a package whose compilation was left out."""

    def __init__(self, path: str, *_: Any) -> None:
        self.program = torch.export.load(path).module()

    def boxed_run(self, tensors: list[torch.Tensor]) -> Any:
        return list(self.program(*tensors))

    def get_constant_fqns(self) -> list[str]:
        return list(self.program.state_dict())

    def load_constants(self, tensors: dict[str, torch.Tensor], *_: bool) -> None:
        self.program.load_state_dict(tensors)


@contextmanager
def compilation_left_out() -> Iterator[None]:
    def package(program: Any, package_path: str, inductor_configs: dict[str, Any]) -> None:
        configs = dict(inductor_configs)
        if not configs.pop("aot_inductor.package_constants_in_so", True):
            assert configs.pop("always_keep_tensor_constants")
            for weight in program.state_dict.values():
                weight.data = torch.full_like(weight, float("nan"))  # leaves the model's own weights as they are
        assert configs == Compile().compiler_options(cuda=False)
        torch.export.save(program, package_path)

    @contextmanager
    def here(artifact: Path, *_: Any) -> Iterator[Any]:
        yield Here(redline.load_exported(artifact))

    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr(torch._inductor, "aoti_compile_and_package", package)
        patch.setattr(torch._C._aoti, "AOTIModelPackageLoader", StandIn)
        patch.setattr(ahead_of_time, "compiler_cache", lambda machine: nullcontext())
        patch.setattr(import_module("redline.ladder.exports.export"), "fresh_process", here)
        yield


class Here:
    load_s = 0.5

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any) -> Any:
        return self.model(*args)
