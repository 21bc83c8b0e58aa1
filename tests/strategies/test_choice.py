"""Which engine a run gets where a launch asks for one, and the script says something too."""

from __future__ import annotations

import json

import pytest

from drivetrain.strategies import create, environment
from drivetrain.strategies.ddp import DDPStrategy
from drivetrain.strategies.fsdp_plugin import FullyShardedDataParallelPlugin


@pytest.fixture
def launched(monkeypatch):
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(environment.SOURCES, json.dumps({"ACCELERATE_USE_FSDP": "distributed_type in two.yaml"}))


class Other:
    """Options of another engine."""

    slot = "megatron_lm_plugin"

    def strategy(self, parallelism=None):
        raise AssertionError("not to be made")


@pytest.mark.parametrize("word", [None, "auto", "fsdp"])
def test_a_launch_chooses_the_engine_and_its_options(launched, word):
    engine = create(word, size=2)
    assert engine.name == "fsdp" and engine.plugin.reshard_after_forward is False


def test_a_script_may_bring_that_engines_options(launched):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    assert create(plugins=[plugin]).plugin is plugin


@pytest.mark.parametrize("given", ["ddp", "single", DDPStrategy()], ids=str)
def test_F1_another_engine_is_an_error_that_shows_both(launched, given):
    name = given if isinstance(given, str) else "ddp"
    with pytest.raises(ValueError) as error:
        create(given, size=2)
    assert f"strategy={name!r}, and ACCELERATE_USE_FSDP=true (distributed_type in two.yaml). Set it" in str(error.value)


def test_F1_options_of_another_engine_too(launched):
    with pytest.raises(ValueError, match=r"Received: megatron_lm_plugin=Other, and ACCELERATE_USE_FSDP=true \(distributed"):
        create(plugins=[Other()])
