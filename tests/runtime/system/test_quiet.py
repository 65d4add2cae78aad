"""Log output of other libraries is suppressed, and stricter settings of the caller are kept."""

import logging
import warnings

import pytest

from secondguess.runtime.system.quiet import LIBRARIES, quiet

TRANSFORMERS = logging.getLogger("transformers")


@pytest.fixture(autouse=True)
def levels():
    loggers = [logging.root, *map(logging.getLogger, LIBRARIES)]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


def test_contexts_that_overlap_restore_the_level():
    TRANSFORMERS.setLevel(logging.INFO)
    first, second = quiet(), quiet()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert TRANSFORMERS.level == logging.ERROR
    second.__exit__(None, None, None)
    assert TRANSFORMERS.level == logging.INFO


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("level", [logging.NOTSET, logging.WARNING, logging.CRITICAL])
def test_warnings_are_suppressed_and_the_callers_level_comes_back(level, name, recwarn):
    logger = logging.getLogger(name)
    logger.setLevel(level)
    with quiet():
        warnings.warn("not shown", stacklevel=1)
        for each in (logger, logger.getChild("a_module_without_level")):
            assert not each.isEnabledFor(logging.WARNING)
            assert each.isEnabledFor(logging.ERROR) == (level < logging.CRITICAL)
    assert logger.level == level
    assert not recwarn


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_stricter_level_of_the_application_is_kept(name):
    logging.root.setLevel(logging.CRITICAL)
    logger = logging.getLogger(name)
    logger.setLevel(logging.NOTSET)
    with quiet():
        assert not logger.isEnabledFor(logging.ERROR)
    assert logger.level == logging.NOTSET


def test_a_level_that_a_library_sets_at_its_import_stays():
    TRANSFORMERS.setLevel(logging.NOTSET)
    with quiet():
        TRANSFORMERS.setLevel(logging.WARNING)
        with quiet():
            assert not TRANSFORMERS.isEnabledFor(logging.WARNING)
    assert TRANSFORMERS.level == logging.WARNING


def test_records_of_the_application_arrive(caplog):
    with caplog.at_level(logging.INFO), quiet():
        logging.getLogger("application").info("arrives")
    assert caplog.messages == ["arrives"]
