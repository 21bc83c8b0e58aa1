"""Messages of several processes: once, in order, and a bar on the first process."""

from __future__ import annotations

import io
import logging

import pytest

from drivetrain import get_logger, patch_environment, tqdm
from drivetrain.strategies.world import current
from drivetrain.tests.distributed import run


@pytest.fixture(autouse=True)
def quiet_root():
    level = logging.root.level
    yield
    logging.root.setLevel(level)
    logging.getLogger("drivetrain-test").setLevel(logging.NOTSET)


def written(path, action):
    """What two ranks append to one file, one after the other where `action` says so."""

    def rank(rank):
        handler = logging.FileHandler(path, delay=True)
        handler.setFormatter(logging.Formatter("%(levelname)s %(funcName)s %(message)s"))
        logging.getLogger("drivetrain-test").addHandler(handler)
        action(get_logger("drivetrain-test", "info"), rank)
        current().barrier()

    run(rank, 2)
    return path.read_text().splitlines() if path.exists() else []


def test_a_message_is_written_once(tmp_path):
    assert written(tmp_path / "log", lambda log, rank: log.info("hello %d", rank)) == ["INFO <lambda> hello 0"]


def test_all_processes_in_order(tmp_path):
    lines = written(tmp_path / "log", lambda log, rank: log.info(f"from {rank}", main_process_only=False, in_order=True))
    assert lines == ["INFO <lambda> from 0", "INFO <lambda> from 1"]


def test_all_processes_at_once(tmp_path):
    lines = written(tmp_path / "log", lambda log, rank: log.error(f"from {rank}", main_process_only=False))
    assert sorted(lines) == ["ERROR <lambda> from 0", "ERROR <lambda> from 1"]


def test_levels_hold(tmp_path):
    assert written(tmp_path / "log", lambda log, rank: log.debug("x", main_process_only=False, in_order=True)) == []


def test_a_warning_once(caplog):
    log = get_logger("drivetrain-test")
    for text in ("a", "a", "b"):
        log.warning_once(text)
    assert [record.getMessage() for record in caplog.records] == ["a", "b"]


def test_the_level_comes_from_the_environment():
    with patch_environment(accelerate_log_level="error"):
        assert get_logger("drivetrain-test").logger.level == logging.ERROR


def test_a_bar_on_the_first_process():
    def rank(rank):
        mine, all_of_them = io.StringIO(), io.StringIO()
        seen = list(tqdm(range(3), file=mine)), list(tqdm(range(3), main_process_only=False, file=all_of_them))
        return seen, bool(mine.getvalue()), bool(all_of_them.getvalue())

    assert run(rank, 2) == [(([0, 1, 2], [0, 1, 2]), True, True), (([0, 1, 2], [0, 1, 2]), False, True)]
    with pytest.raises(TypeError, match="main_process_only=True by name"):
        tqdm(True, range(3))
