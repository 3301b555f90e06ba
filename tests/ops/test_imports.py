"""`from redline.ops import <op>` gives the function in every import order, and imports neither Triton nor CUDA."""

import subprocess
import sys
import textwrap

import pytest

from .registry import OPS


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )


def test_every_op_is_a_function_in_every_import_order() -> None:
    """Each order runs in a forked process that has imported torch, but nothing of redline."""
    ops = [(op.function.__module__.split(".")[2], op.name) for op in OPS]
    found = run(f"""
        import importlib, os, sys
        import torch

        def is_function(name):
            namespace = {{}}
            exec(f"from redline.ops import {{name}}", namespace)
            return type(namespace[name]).__name__ == "function"

        def fails(before, ops):
            pid = os.fork()
            if not pid:
                assert not any(module.startswith("redline") for module in sys.modules)
                for module in before:
                    importlib.import_module(module)
                for package, name in ops:
                    correct = is_function(name)
                    # The submodule stays importable, and importing it again does not change the name.
                    importlib.import_module(f"redline.ops.{{package}}")
                    if not correct or not is_function(name):
                        os._exit(1)
                os._exit(0)
            return os.waitpid(pid, 0)[1]

        failed = [("all", "redline.ops")] if fails(["redline.ops"], {ops}) else []
        for package, name in {ops}:
            submodules = [f"redline.ops.{{package}}", f"redline.ops.{{package}}.reference"]
            for before in ([], submodules[:1], submodules):
                if fails(before, [(package, name)]):
                    failed.append((name, before))
        sys.exit(str(failed) if failed else 0)
    """)
    assert found.returncode == 0, found.stderr


def test_an_op_is_a_function_after_its_kernels_were_imported() -> None:
    pytest.importorskip("triton")
    found = run("import redline.ops.rms_norm.triton\nfrom redline.ops import rms_norm\nassert callable(rms_norm)")
    assert found.returncode == 0, found.stderr


def test_importing_the_ops_starts_neither_triton_nor_cuda() -> None:
    found = run("import sys, torch, redline.ops; assert not ('triton' in sys.modules or torch.cuda.is_initialized())")
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["climb", "--help"]])
def test_help_imports_neither_torch_nor_triton(arguments: list[str]) -> None:
    found = run(f"""
        import sys
        import redline
        from redline.cli import main
        assert not {{"torch", "triton"}} & set(sys.modules), "import redline"
        sys.argv = ["redline", *{arguments}]
        try:
            main()
        except SystemExit as exit:
            assert not exit.code
        assert not {{"torch", "triton"}} & set(sys.modules), "--help"
    """)
    assert found.returncode == 0, found.stderr
