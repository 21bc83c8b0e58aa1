"""Accelerate's functions around environment variables."""

from __future__ import annotations

import os

import pytest

from drivetrain import (
    are_libraries_initialized,
    clear_environment,
    convert_dict_to_env_variables,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)


def test_variables_for_a_block(monkeypatch):
    monkeypatch.setenv("DT_OLD", "1")
    monkeypatch.delenv("DT_NEW", raising=False)
    with pytest.raises(RuntimeError), patch_environment(dt_old=2, DT_NEW="x"):
        assert (os.environ["DT_OLD"], os.environ["DT_NEW"]) == ("2", "x")
        raise RuntimeError
    assert os.environ["DT_OLD"] == "1" and "DT_NEW" not in os.environ


def test_no_variables_for_a_block(monkeypatch):
    monkeypatch.setenv("DT_OLD", "1")
    with clear_environment():
        assert not os.environ
        os.environ["DT_NEW"] = "x"
    assert os.environ["DT_OLD"] == "1" and "DT_NEW" not in os.environ


def test_what_a_function_sets_is_taken_back(monkeypatch):
    monkeypatch.setenv("ACCELERATE_OLD", "1")

    @purge_accelerate_environment
    def change():
        os.environ.update(ACCELERATE_OLD="2", ACCELERATE_NEW="3")
        return os.environ["ACCELERATE_NEW"]

    @purge_accelerate_environment
    class Tests:
        def test_one(self):
            os.environ["ACCELERATE_NEW"] = "4"

    assert change() == "3" and Tests().test_one() is None
    assert os.environ["ACCELERATE_OLD"] == "1" and "ACCELERATE_NEW" not in os.environ


def test_values(monkeypatch):
    monkeypatch.setenv("DT_FLAG", "Yes")
    monkeypatch.setenv("DT_NUMBER", "3")
    assert (str_to_bool("on"), str_to_bool("F"), str_to_bool("t", to_bool=True)) == (1, 0, True)
    with pytest.raises(ValueError, match="perhaps"):
        str_to_bool("perhaps")
    assert parse_flag_from_env("DT_FLAG") is True and parse_flag_from_env("DT_NONE", default=True) is True
    assert get_int_from_env(["DT_NONE", "DT_NUMBER"], 7) == 3 and get_int_from_env(["DT_NONE"], 7) == 7
    assert parse_choice_from_env("DT_NUMBER") == "3" and parse_choice_from_env("DT_NONE") == "no"
    assert convert_dict_to_env_variables({"A": 1, "B": "x;y", "C": "z"}) == ["A=1\n", "C=z\n"]
    assert are_libraries_initialized("os", "no_such_library") == ["os"]
