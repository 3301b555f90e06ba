import logging
import sys
import warnings

import pytest

from redline.machine.quiet import quiet, unadvised


def test_nothing_comes_out_and_everything_is_restored(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level, logging.root.manager.disable, list(warnings.filters))
    with quiet():
        print("chatter")
        print("chatter", file=sys.stderr)
        warnings.warn("chatter", stacklevel=1)
        logging.getLogger("some.library").error("chatter")
        logging.basicConfig(level=logging.DEBUG, force=True)
        warnings.filterwarnings("ignore", message="anything")
    assert capsys.readouterr() == ("", "")
    assert (list(root.handlers), root.level, logging.root.manager.disable, list(warnings.filters)) == before


def test_restored_when_it_raises() -> None:
    before = logging.root.manager.disable
    with pytest.raises(ValueError, match="inside"), quiet():
        raise ValueError("inside")
    assert logging.root.manager.disable == before


def test_only_advice_is_suppressed() -> None:
    before = list(warnings.filters)
    with unadvised():
        warnings.warn("TensorFloat32 tensor cores for float32 matrix multiplication available", stacklevel=1)
        with pytest.warns(UserWarning, match="something else"):
            warnings.warn("something else", stacklevel=1)
    assert list(warnings.filters) == before
