"""Log output of other libraries is suppressed, and stricter settings of the caller are kept."""

import logging
import warnings

import pytest

from secondguess.runtime.quiet import quiet


def test_contexts_that_overlap_restore_the_level():
    first, second = quiet(), quiet()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert logging.root.manager.disable == logging.WARNING
    second.__exit__(None, None, None)
    assert logging.root.manager.disable == logging.NOTSET


@pytest.mark.parametrize("level", [logging.NOTSET, logging.WARNING, logging.CRITICAL])
def test_warnings_are_suppressed_and_the_callers_level_comes_back(level, caplog):
    logging.disable(level)
    try:
        with quiet():
            warnings.warn("not shown", stacklevel=1)
            logging.getLogger("library").warning("not logged")
            assert logging.root.manager.disable >= level
        assert logging.root.manager.disable == level
    finally:
        logging.disable(logging.NOTSET)
    assert caplog.records == []
