"""Launcher detection as a table, and the values that are read from the environment at call time."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
from drivetrain.strategies import environment
from drivetrain.strategies.environment import detect, expand_hosts

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
            "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "x",
            "TORCHELASTIC_RESTART_COUNT": "2"}
SLURM = {"SLURM_JOB_ID": "123", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
         "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_NODELIST": "node[07-08]"}
SRUN = {**SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_TASK_PID": "77"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
JSRUN = {"LSB_JOBID": "55", "JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_LOCAL_RANK": "2",
         "JSM_NAMESPACE_LOCAL_SIZE": "3", "MASTER_ADDR": "h"}
SHELL = {"SLURM_JOB_ID": "9", "SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "4", "SLURM_NNODES": "1",
         "SLURM_NODELIST": "node1"}
IN_SHELL = {**SHELL, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}

# name: (environment, (launcher, launched, rank, size, local rank, local size, node, nodes))
TABLE = {
    "nothing": ({}, ("none", False, 0, 1, 0, 1, 0, 1)),
    "stray_values": ({"RANK": "1", "MASTER_PORT": "1", "LOCAL_RANK": "1"}, ("none", False, 0, 1, 0, 1, 0, 1)),
    "torchrun": (TORCHRUN, ("torchrun", True, 3, 4, 1, 2, 1, 2)),
    "torchrun_of_one": ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                         "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, ("torchrun", True, 0, 1, 0, 1, 0, 1)),
    "torchrun_in_slurm": ({**SRUN, **TORCHRUN}, ("torchrun", True, 3, 4, 1, 2, 1, 2)),
    "kubeflow": ({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"},
                 ("kubeflow", True, 1, 3, 0, 1, 1, 3)),
    "kubeflow_two_a_pod": ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
                            "MASTER_ADDR": "m", "MASTER_PORT": "1"}, ("kubeflow", True, 3, 4, 1, 2, 1, 2)),
    "slurm_srun": (SRUN, ("slurm", True, 2, 4, 0, 2, 1, 2)),
    "slurm_without_step": (SLURM, ("slurm", True, 2, 4, 0, 2, 1, 2)),
    "slurm_uneven_nodes": ({**SRUN, "SLURM_NTASKS": "5", "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4",
                            "SLURM_NODEID": "2", "SLURM_NNODES": "3", "SLURM_TASKS_PER_NODE": "2(x2),1"},
                           ("slurm", True, 4, 5, 0, 1, 2, 3)),
    "slurm_step_smaller_than_job": ({**SRUN, "SLURM_NTASKS": "8", "SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "2"},
                                    ("slurm", True, 2, 4, 0, 2, 1, 2)),
    "slurm_one_task": ({**SRUN, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0",
                        "SLURM_NODEID": "0", "SLURM_NODELIST": "node07"}, ("slurm", True, 0, 1, 0, 1, 0, 1)),
    "salloc_shell": (SHELL, ("none", False, 0, 1, 0, 1, 0, 1)),
    "salloc_interactive_step": ({**IN_SHELL, "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_TASK_PID": "4"},
                                ("none", False, 0, 1, 0, 1, 0, 1)),
    "salloc_named_interactive": (IN_SHELL, ("none", False, 0, 1, 0, 1, 0, 1)),
    "srun_pty_bash": ({**IN_SHELL, "SLURM_JOB_NAME": "bash", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1",
                       "SLURM_PTY_PORT": "44444"}, ("none", False, 0, 1, 0, 1, 0, 1)),
    "srun_pty_bash_named_else": ({**SRUN, "SLURM_PROCID": "0", "SLURM_PTY_PORT": "4"},
                                 ("none", False, 0, 1, 0, 1, 0, 1)),
    "srun_pty_bash_few_variables": ({**IN_SHELL, "SLURM_JOB_NAME": "bash"}, ("none", False, 0, 1, 0, 1, 0, 1)),
    "srun_inside_salloc": ({**IN_SHELL, "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_STEP_ID": "1",
                            "SLURM_STEP_NUM_TASKS": "4"}, ("slurm", True, 3, 4, 3, 4, 0, 1)),
    "sbatch_without_srun": ({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_TASK_PID": "5"},
                            ("none", False, 0, 1, 0, 1, 0, 1)),
    "open_mpi": (OPEN_MPI, ("mpi", True, 1, 2, 1, 2, 0, 1)),
    "open_mpi_in_slurm": ({**SRUN, **OPEN_MPI}, ("mpi", True, 1, 2, 1, 2, 0, 1)),
    "intel_mpi": ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2",
                   "MASTER_ADDR": "h"}, ("mpi", True, 2, 4, 0, 2, 1, 2)),
    "intel_mpi_in_slurm": ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"},
                           ("mpi", True, 2, 4, 2, 4, 0, 1)),
    "srun_with_pmi": ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "4"}, ("slurm", True, 2, 4, 0, 2, 1, 2)),
    "mvapich": ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1",
                 "MV2_COMM_WORLD_LOCAL_SIZE": "2"}, ("mpi", True, 1, 2, 1, 2, 0, 1)),
    "mpich_pals": ({"PMI_RANK": "1", "PMI_SIZE": "2", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"},
                   ("mpi", True, 1, 2, 1, 2, 0, 1)),
    "lsf": (JSRUN, ("lsf", True, 5, 6, 2, 3, 1, 2)),
    "lsf_with_spectrum_mpi": ({**OPEN_MPI, **JSRUN}, ("lsf", True, 5, 6, 2, 3, 1, 2)),
    "lsf_shell": ({"LSB_JOBID": "55"}, ("none", False, 0, 1, 0, 1, 0, 1)),
    "xla": ({"PJRT_DEVICE": "TPU", "PJRT_LOCAL_PROCESS_RANK": "2", "PJRT_LOCAL_PROCESS_COUNT": "4",
             "TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}, ("xla", True, 6, 8, 2, 4, 1, 2)),
    "xla_one_process": ({"PJRT_DEVICE": "CPU"}, ("none", False, 0, 1, 0, 1, 0, 1)),
}


@pytest.mark.parametrize("name", TABLE)
def test_S3_detection(name):
    environ, right = TABLE[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = detect(environ)
    assert [str(one.message)[-9:] for one in caught if one.category is not ResourceWarning] == (["Use srun."] if name == "sbatch_without_srun" else [])
    assert (found.launcher, found.launched, found.rank, found.size, found.local_rank, found.local_size,
            found.node_rank, found.num_nodes) == right


def test_each_value_says_where_it_came_from():
    found = detect(SRUN)
    assert found.sources["rank"] == "SLURM_PROCID"
    assert found.sources["size"] == "SLURM_STEP_NUM_TASKS"
    assert found.sources["main_address"] == "SLURM_NODELIST"
    assert detect(TORCHRUN).sources["main_port"] == "MASTER_PORT"
    assert detect({}).sources == {}


def test_restarts_are_counted():
    assert detect(TORCHRUN).attempt == 2 and detect(SRUN).attempt == 0


# (environment, main address)
ADDRESSES = {
    "exported": ({**SRUN, "MASTER_ADDR": "chosen"}, "chosen"),
    "slurm_first_of_list": (SRUN, "node07"),
    "slurm_step_before_job": ({**SRUN, "SLURM_STEP_NODELIST": "a[3,5]"}, "a3"),
    "slurm_one_node": ({**SRUN, "SLURM_NODELIST": "node07"}, "127.0.0.1"),
    "mpi_one_node": (OPEN_MPI, "127.0.0.1"),
    "mpi_in_slurm": ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "SLURM_JOB_NODELIST": "x[1-2]"}, "x1"),
    "mpi_unknown": ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ""),
    "nothing": ({}, "127.0.0.1"),
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_main_address(name):
    environ, right = ADDRESSES[name]
    assert detect(environ).main_address == right


@pytest.mark.parametrize(("hosts", "right"), [
    ("batch1\nnode5\nnode5\nnode5\nnode6\nnode6\nnode6\n", "node5"),  # the launch node runs no rank
    ("node5\nnode5\nnode5\nnode6\nnode6\nnode6\n", "node5"),
])
def test_lsf_main_address_from_its_rank_file(tmp_path, hosts, right):
    (tmp_path / "ranks").write_text(hosts)
    environ = {name: value for name, value in JSRUN.items() if name != "MASTER_ADDR"}
    assert detect({**environ, "LSB_DJOB_RANKFILE": str(tmp_path / "ranks")}).main_address == right


def test_pbs_node_file_serves_mpi(tmp_path):
    (tmp_path / "nodes").write_text("first\nsecond\n")
    environ = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PBS_NODEFILE": str(tmp_path / "nodes")}
    assert detect(environ).main_address == "first"


def test_all_ranks_of_a_job_agree_on_a_port_and_two_jobs_differ():
    ports = {detect({**SRUN, "SLURM_PROCID": str(rank)}).main_port for rank in range(4)}
    assert ports == {15123}
    assert detect({**SRUN, "SLURM_JOB_ID": "124"}).main_port != 15123
    assert detect({**SRUN, "SLURM_STEP_ID": "1"}).main_port != 15123
    assert detect({**SRUN, "SLURM_JOB_ID": "987654321"}).main_port < 32768
    assert detect({**SRUN, "MASTER_PORT": "4000"}).main_port == 4000
    assert detect({}).main_port == 29500


@pytest.mark.parametrize(("changed", "message"), [
    ({"RANK": "one"}, "Expected an integer. Received: RANK='one'"),
    ({"RANK": "4"}, "Received: RANK=4, WORLD_SIZE=4"),
    ({"RANK": "-1"}, "Received: RANK=-1, WORLD_SIZE=4"),
    ({"MASTER_PORT": "http"}, "Received: MASTER_PORT='http'"),
])
def test_values_that_make_no_sense_are_named(changed, message):
    with pytest.raises(ValueError) as caught:
        detect({**TORCHRUN, **changed})
    assert message in str(caught.value)


@pytest.mark.parametrize(("hosts", "right"), [
    ("", []),
    ("node1", ["node1"]),
    ("node1,node2", ["node1", "node2"]),
    ("node[01-03,7],gpu1", ["node01", "node02", "node03", "node7", "gpu1"]),
    ("node[098-101]", ["node098", "node099", "node100", "node101"]),
    ("r[1-2]n[3-4]x", ["r1n3x", "r1n4x", "r2n3x", "r2n4x"]),
    ("a-b[1]-c, d", ["a-b1-c", "d"]),
])
def test_host_lists(hosts, right):
    assert expand_hosts(hosts) == right


# Values read at call time


def test_text_flag_and_integer(monkeypatch):
    assert environment.text("ACCELERATE_X") is None and environment.text("X", "d") == "d"
    assert environment.flag("X") is False and environment.flag("X", True) is True and environment.integer("X", 3) == 3
    monkeypatch.setenv("X", "not ours")
    assert environment.text("X") is None
    monkeypatch.setenv("ACCELERATE_X", "1")
    assert environment.text("X") == "1" and environment.flag("X") and environment.integer("X") == 1
    monkeypatch.setenv("DRIVETRAIN_X", "no")
    assert environment.text("X") == "no" and environment.text("ACCELERATE_X") == "1" and not environment.flag("X")
    monkeypatch.setenv("DRIVETRAIN_X", "")
    assert environment.text("X") == "1"


@pytest.mark.parametrize(("value", "right"), [
    ("1", True), ("TRUE", True), ("yes", True), ("On", True), ("0", False), ("False", False), ("n", False),
])
def test_flags(monkeypatch, value, right):
    monkeypatch.setenv("DRIVETRAIN_X", value)
    assert environment.flag("DRIVETRAIN_X") is right


def test_a_flag_that_is_neither_is_named(monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_X", "maybe")
    with pytest.raises(ValueError, match="Expected yes or no. Received: DRIVETRAIN_X='maybe'"):
        environment.flag("DRIVETRAIN_X")


def test_child_environment(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("GONE", "1")
    child = environment.child_environment({"NEW": "2", "GONE": None})
    assert child["OMP_NUM_THREADS"] == "1" and child["NEW"] == "2" and "GONE" not in child
    assert child["PATH"] == os.environ["PATH"] and "NEW" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment.child_environment()["OMP_NUM_THREADS"] == "7"


def test_exporting_is_undone(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    with pytest.raises(KeyError), environment.exported({"PATH": os.environ["PATH"], "NEW": "2"}):
        assert os.environ["NEW"] == "2" and "KEPT" not in os.environ
        raise KeyError
    assert os.environ["KEPT"] == "1" and "NEW" not in os.environ


def test_a_test_runner_is_known_and_what_it_starts_is_none():
    assert environment.under_test_runner()
    program = "from drivetrain.strategies import environment as e; print(e.under_test_runner(), e.interactive())"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert "PYTEST_CURRENT_TEST" in os.environ and result.stdout.split() == ["False", "False"]


def test_the_prompt_is_interactive():
    program = "from drivetrain.strategies import environment as e; print(e.interactive())"
    result = subprocess.run([sys.executable, "-i", "-c", program], input="", capture_output=True, text=True, timeout=240)
    assert result.stdout.strip() == "True"


def test_unittest_is_a_test_runner(tmp_path):
    (tmp_path / "test_it.py").write_text("""
import unittest
from drivetrain.strategies import environment
class Test(unittest.TestCase):
    def test_runner(self):
        self.assertTrue(environment.under_test_runner())
""")
    result = subprocess.run([sys.executable, "-m", "unittest", "test_it"], cwd=tmp_path, capture_output=True, text=True,
                            timeout=240)
    assert result.returncode == 0, result.stderr


# What a launch says to an engine


def test_a_group_of_variables(monkeypatch):
    launched = environment.group("FSDP_")
    for name in launched.names():
        monkeypatch.delenv(launched.variable(name))
    assert launched.text("version") is None and launched.integer("version", 1) == 1
    for name, value in {"VERSION": "2", "OFFLOAD_PARAMS": "true", "RATE": "0.5", "LENGTH": "None", "EMPTY": ""}.items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    assert launched.names() == ["empty", "length", "offload_params", "rate", "version"]
    assert launched.integer("VERSION") == 2 and launched.flag("offload_params") and launched.number("rate") == 0.5
    assert launched.integer("length", 7) == 7 and launched.text("empty", "d") == "d" and launched.flag("absent", True)


def test_a_group_names_the_variable_that_is_wrong(monkeypatch):
    monkeypatch.setenv("FSDP_VERSION", "two")
    with pytest.raises(ValueError, match="Expected an integer. Received: FSDP_VERSION='two'"):
        environment.group("FSDP_").integer("version")
    with pytest.raises(ValueError, match="Expected a number. Received: FSDP_VERSION='two'"):
        environment.group("FSDP_").number("version")
    with pytest.raises(ValueError, match="Expected yes or no. Received: FSDP_VERSION='two'"):
        environment.group("FSDP_").flag("version")


def test_an_argument_has_to_agree_with_what_somebody_told_the_launch(monkeypatch):
    launched = environment.group("FSDP_")
    assert launched.agreed("version", None, 1) == 1 and launched.agreed("version", 2, 1) == 2  # nobody has said 1
    monkeypatch.setenv(environment.SOURCES, '{"FSDP_VERSION": "fsdp_version in two.yaml"}')
    assert launched.agreed("version", 1, 1) == 1 and launched.agreed("version", None, 1) == 1
    assert launched.agreed("offload_params", True, False) is True
    with pytest.raises(ValueError, match=r"Received: version=2, FSDP_VERSION=1 \(fsdp_version in two.yaml\). Set it in"):
        launched.agreed("version", 2, 1)
