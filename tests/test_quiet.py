import logging
import sys
import warnings

import pytest

from redline.quiet import quiet


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
