"""`drivetrain launch`: what it starts, what the processes learn of it, which of several settings wins."""

from __future__ import annotations

import shlex

import pytest

from drivetrain.tests.distributed import free_port
from drivetrain.trainer.cli import document
from drivetrain.trainer.cli.main import main

pytestmark = pytest.mark.timeout(500)  # a test may start several launches, one after another, on a machine that is busy

SCRIPT = """
import os, sys
from pathlib import Path
from drivetrain import Accelerator
accelerator = Accelerator()
words = (accelerator.num_processes, accelerator.device.type, accelerator.mixed_precision,
         accelerator.gradient_accumulation_steps, accelerator.dynamo_plugin.backend.value, __name__, sys.argv[1:])
Path(f"told-{accelerator.process_index}").write_text(" ".join(map(str, words)))
if "fail" in sys.argv and accelerator.process_index == 1:
    raise ArithmeticError("as asked")
if "exit" in sys.argv:
    sys.exit(7)
"""
NAMES = "import os, sys; print('names', *sorted(f'{k}={v}' for k, v in os.environ.items() if k.startswith(sys.argv[1])))"


def ranks(place) -> list[str]:
    """What each process has written, by rank, into a file of its own: what several print to one stream mixes."""
    found = sorted(place.path.glob("told-*"))
    texts = [f"{file.name.removeprefix('told-')}: {file.read_text().strip()}" for file in found]
    for file in found:
        file.unlink()
    return texts


@pytest.fixture
def place(home, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(home.path / "hf"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    home.write("script.py", SCRIPT)
    home.write("names.py", NAMES)
    return home


def config(capsys, *args) -> tuple[dict, str]:
    assert main(["launch", "--print-config", *args]) == 0
    text = capsys.readouterr().out
    return document.read(text), text


def refused(capsys, *args) -> str:
    with pytest.raises(SystemExit) as end:
        main(["launch", *args])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_D9_two_processes_on_the_cpu(place):
    done = place.cli("launch", "--cpu", "--num_processes", "2", "script.py", "--lr", "1")
    assert done.returncode == 0, done.stderr
    assert ranks(place) == [f"{rank}: 2 cpu no 1 NO __main__ ['--lr', '1']" for rank in (0, 1)]


def test_settings_reach_the_accelerator_of_each_process(place):
    flags = ["--mixed_precision=bf16", "--gradient_accumulation_steps", "3", "--dynamo_backend", "eager", "--num-processes=2"]
    done = place.cli("launch", "--cpu", *flags, "-m", "script", "a")
    assert done.returncode == 0, done.stderr
    assert ranks(place) == [f"{rank}: 2 cpu bf16 3 EAGER __main__ ['a']" for rank in (0, 1)]


def test_the_exit_code_is_the_scripts_and_the_failing_rank_comes_first(place):
    done = place.cli("launch", "--cpu", "--num_processes", "2", "script.py", "fail")
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("Rank 1 of 2 failed first: it ended with exit code 1.") :]
    assert "ArithmeticError: as asked" in report
    assert place.cli("launch", "--cpu", "script.py", "exit").returncode == 7
    quiet = place.cli("launch", "-q", "--cpu", "--num_processes", "2", "script.py", "exit")
    assert quiet.returncode == 7 and "failed first" not in quiet.stderr


def test_one_process_takes_the_launchers_place(place):
    done = place.cli("launch", "--cpu", "--debug", "names.py", "ACCELERATE_")
    assert done.stdout == "names ACCELERATE_DEBUG_MODE=true ACCELERATE_USE_CPU=true\n", done.stderr
    done = place.cli("launch", "--cpu", "names.py", "RANK")
    assert done.stdout == "names\n"  # nothing says that it was launched


def test_a_program_that_is_not_python(place):
    done = place.cli("launch", "--cpu", "--num_processes", "2", "--no_python", "sh", "-c", "echo of $WORLD_SIZE > told-$RANK")
    assert ranks(place) == ["0: of 2", "1: of 2"], done.stderr
    done = place.cli("launch", "--cpu", "--no_python", "sh", "-c", "echo alone; exit 3")
    assert (done.stdout, done.returncode) == ("alone\n", 3)


def test_two_machines_meet(place):
    import threading

    port = str(free_port())
    flags = ["--cpu", "--num_processes", "2", "--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    done: dict = {}

    def machine(number):
        done[number] = place.cli("launch", *flags, "--machine_rank", str(number), "script.py")

    threads = [threading.Thread(target=machine, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [done[number].returncode for number in (0, 1)] == [0, 0], done[0].stderr + done[1].stderr
    assert ranks(place) == ["0: 2 cpu no 1 NO __main__ []", "1: 2 cpu no 1 NO __main__ []"]


def test_restarts_and_logs(place):
    place.write("once.py", "import os, sys, pathlib\nmark = pathlib.Path('mark' + os.environ['RANK'])\n"
                "if not mark.exists():\n    mark.touch()\n    sys.exit(1)\nprint('rank', os.environ['RANK'])")  # fmt: skip
    done = place.cli("launch", "--cpu", "--num_processes", "2", "--max_restarts", "2", "--log_dir", "logs", "--tee", "3", "once.py")
    assert done.returncode == 0, done.stderr
    assert {file.read_text() for file in place.path.glob("logs/**/stdout.log")} >= {"rank 0\n", "rank 1\n"}


def test_F2_command_line_over_file_over_environment_over_machine_over_default(place, capsys, monkeypatch):
    machine = place.write("hf/accelerate/default_config.yaml", "{mixed_precision: fp16, num_processes: 2, use_cpu: true}")
    named = place.write("named.yaml", "{mixed_precision: bf16, gradient_accumulation_steps: 2}")
    found, text = config(capsys)
    assert found["mixed_precision"] == "fp16" and f"mixed_precision: fp16  # {machine}" in text
    assert f"# launch file: {machine} (the default of this machine, in Accelerate's place)" in text
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    found, text = config(capsys)
    assert found["mixed_precision"] == "no" and 'mixed_precision: "no"  # ACCELERATE_MIXED_PRECISION' in text
    found, text = config(capsys, "--config_file", "named.yaml", "--cpu")
    assert f"mixed_precision: bf16  # {named}" in text and found["num_processes"] == 1  # the machine's file is not read
    found, text = config(capsys, "--config_file", "named.yaml", "--cpu", "--mixed_precision", "fp16")
    assert "mixed_precision: fp16  # command line" in text
    assert f"gradient_accumulation_steps: 2  # {named}" in text and "num_machines: 1  # default" in text


def test_F2_the_log_names_the_machines_file(place):
    machine = place.write("xdg/drivetrain/launch.yaml", "{mixed_precision: bf16, use_cpu: true, num_processes: 1}")
    done = place.cli("launch", "script.py")
    assert ranks(place) == ["0: 1 cpu bf16 1 NO __main__ []"]
    assert f"Launch file: {machine} (the default of this machine): " in done.stderr
    assert "mixed_precision=bf16" in done.stderr


def test_what_is_printed_is_a_launch_file(place, capsys):
    _, text = config(capsys, "--cpu", "--num_processes", "4", "--gpu_ids", "0,1", "--dynamo_backend", "eager", "script.py")
    place.write("again.yaml", text)
    _, again = config(capsys, "--config_file", "again.yaml", "script.py")
    assert [line.split("  #")[0] for line in again.splitlines() if not line.startswith("#")] == [
        line.split("  #")[0] for line in text.splitlines() if not line.startswith("#")
    ]
    assert "# 4 processes on this machine: " in text and "# ACCELERATE_DYNAMO_BACKEND=EAGER" in text


def test_gpus_are_chosen_by_their_numbers(place, capsys):
    found, text = config(capsys, "--gpu_ids", "2,3", "script.py")
    assert found["num_processes"] == 2 and "# CUDA_VISIBLE_DEVICES=2,3" in text
    assert "a GPU for each of 3 processes" in refused(capsys, "--gpu_ids", "2,3", "--num_processes", "3", "script.py")


def test_nothing_distributed_is_one_process(place, capsys):
    place.write("one.yaml", "{distributed_type: 'NO', use_cpu: false}")
    found, text = config(capsys, "--config_file", "one.yaml")
    assert found["num_processes"] == 1 and "num_processes: 1  # default: nothing is distributed" in text


def test_values_of_deepspeeds_section_count_only_with_deepspeed(place, capsys):
    place.write("ds.yaml", "{distributed_type: MULTI_CPU, deepspeed_config: {gradient_accumulation_steps: 4}}")
    found, text = config(capsys, "--config_file", "ds.yaml")
    assert found["gradient_accumulation_steps"] is None


def test_threads_are_shared_out_among_processes_on_the_cpu(place, capsys):
    import os

    found, text = config(capsys, "--cpu", "--num_processes", "2")
    assert found["num_cpu_threads_per_process"] == max(1, os.cpu_count() // 2)
    found, text = config(capsys, "--cpu", "--num_processes", "2", "--num_cpu_threads_per_process", "3")
    assert "# OMP_NUM_THREADS=3" in text


def test_mpi_commands(place, capsys, monkeypatch):
    place.write("hosts", "one\ntwo\n")
    flags = ["--mpirun_hostfile", "hosts", "--num_processes", "4", "--num_machines", "2", "--main_process_ip", "10.0.0.1"]
    found, text = config(capsys, *flags, "--mixed_precision", "bf16", "script.py", "x")
    command = text.splitlines()[-1]
    assert command.startswith("# mpirun --hostfile hosts -n 4 -npernode 2 -x ACCELERATE_MIXED_PRECISION=bf16 -x ACCELERATE_USE_CPU=true")
    assert " -x MASTER_ADDR=10.0.0.1 -x MASTER_PORT=29500 " in command and command.endswith("script.py x")
    assert found["use_cpu"] is True
    monkeypatch.setenv("PATH", str(place.path))
    assert "Expected mpirun." in refused(capsys, *flags, "script.py")


def test_open_mpi_starts_the_ranks_for_real(place):
    """Two ranks by the mpirun of the openmpi package: they meet, agree on a sum, and their exit code is the launch's."""
    import os
    import sys
    from pathlib import Path

    variables = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    place.write("hosts", "127.0.0.1 slots=2\n")
    place.write("sum.py", "import torch\nfrom drivetrain import Accelerator\nfrom pathlib import Path\na = Accelerator()\n"
                "total = a.reduce(torch.tensor(float(a.process_index + 1)))\nwords = (a.num_processes, a.mixed_precision, total.item())\n"
                "Path(f'told-{a.process_index}').write_text(' '.join(map(str, words)))")  # fmt: skip
    flags = ["launch", "--mpirun_hostfile", "hosts", "--num_processes", "2"]
    done = place.cli(*flags, "--mixed_precision", "bf16", "sum.py", **variables)
    assert (done.returncode, ranks(place)) == (0, ["0: 2 bf16 3.0", "1: 2 bf16 3.0"]), done.stderr
    done = place.cli(*flags, "--no_python", "sh", "-c", "exit $((7 * OMPI_COMM_WORLD_RANK))", **variables)
    assert done.returncode == 7, done.stderr


def test_intels_mpirun_starts_the_ranks(place, monkeypatch):
    starter = place.write("bin/mpirun", '#!/bin/sh\n[ "$1" = --version ] && echo "Intel(R) MPI Library" && exit\n'
                          'while [ "$1" != -genv ]; do echo "word $1"; shift; done\n'
                          'while [ "$1" = -genv ]; do export "$2=$3"; shift 3; done\nexec "$@"\n')  # fmt: skip
    starter.chmod(0o755)
    import os

    path = f"{starter.parent}{os.pathsep}{os.environ['PATH']}"
    done = place.cli("launch", "--mpirun_hostfile", "hosts", "--num_processes", "2", "names.py", "ACCELERATE_", PATH=path)
    assert done.stdout.split() == ["word", "-f", "word", "hosts", "word", "-n", "word", "2", "word", "-ppn", "word", "2",
                                   "names", "ACCELERATE_USE_CPU=true"], done.stderr  # fmt: skip


def test_tpu_pods_command_lines(place, capsys):
    place.write("tpu.yaml", "{distributed_type: XLA, tpu_use_cluster: true, tpu_name: pod, tpu_zone: z, tpu_env: [A=1], num_processes: 8,"
                " mixed_precision: bf16}")  # fmt: skip
    assert main(["launch", "--config_file", "tpu.yaml", "-m", "script"]) == 0
    command = capsys.readouterr().out
    assert command.startswith("gcloud compute tpus tpu-vm ssh pod --zone z --command 'export A=1; ")
    assert command.endswith("; python3 -m script' --worker all\n") and "export ACCELERATE_USE_XLA=true; " in command
    assert "export ACCELERATE_MIXED_PRECISION=bf16; " in command and "SOURCES" not in command
    assert main(["launch", "--tpu_cluster", "--vm", "a", "--vm", "b", "--cpu", "script.py"]) == 0
    assert [line.split()[5] for line in capsys.readouterr().out.splitlines()] == ["a", "b"]


def dry(capsys, *args) -> list[str]:
    assert main(["launch", "--dry_run", *args]) == 0
    return shlex.split(capsys.readouterr().out)


def test_deepspeeds_own_launcher_on_several_machines(place, capsys, monkeypatch):
    monkeypatch.setattr("drivetrain.trainer.cli.launch.is_here", lambda engine: True)
    flags = ["--use_deepspeed", "--num_machines", "2", "--num_processes", "4", "--main_process_ip", "10.0.0.1", "--cpu"]
    found = dry(capsys, *flags, "--deepspeed_hostfile", "hosts", "--deepspeed_exclusion_filter", "one:1", "script.py", "x")
    assert found == ["deepspeed", "--hostfile", "hosts", "--no_local_rank", "--launcher", "pdsh", "--exclude", "one:1",
                     "--master_addr", "10.0.0.1", "--master_port", "29500", "script.py", "x"]  # fmt: skip
    alone = ["--deepspeed_hostfile", "hosts", "--deepspeed_multinode_launcher", "nossh", "--machine_rank", "1"]
    assert dry(capsys, *flags, *alone, "-m", "script")[3:] == [
        "--node_rank", "1", "--no_ssh", "--num_gpus", "2", "--master_addr", "10.0.0.1", "--master_port", "29500", "--module", "script"
    ]  # fmt: skip
    assert dry(capsys, *flags, "script.py")[:5] == ["2", "processes", "on", "this", "machine:"]  # by torchrun's agent
    assert "Expected a hostfile" in refused(capsys, *flags, "--dry_run", "--deepspeed_multinode_launcher", "pdsh", "script.py")


def test_deepspeeds_launcher_gets_the_variables_by_a_file(place):
    place.write("bin/deepspeed", '#!/bin/sh\ngrep ZERO_STAGE "$DS_ENV_FILE"\nexit 5\n').chmod(0o755)
    done = place.python("-c", "import sys; from drivetrain.trainer.cli import launch; launch.is_here = lambda engine: True\n"
                        "sys.exit(launch.main('launch', sys.argv[1:]))", "--use_deepspeed", "--zero_stage", "2", "--cpu",
                        "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "10.0.0.1", "--deepspeed_hostfile",
                        "hosts", "script.py", PATH=f"{place.path / 'bin'}:/usr/bin:/bin")  # fmt: skip
    assert (done.stdout, done.returncode) == ("ACCELERATE_DEEPSPEED_ZERO_STAGE=2\n", 5), done.stderr


@pytest.mark.parametrize("switch", [[], ["-m"]])
def test_a_function_of_a_script_for_tpus(place, capsys, monkeypatch, switch):
    monkeypatch.setattr("drivetrain.trainer.cli.launch.is_here", lambda engine: True)
    place.write("onchip.py", "import sys\n\ndef go():\n    print('gone', sys.argv[1:])")
    name = ["-m", "onchip"] if switch else ["onchip.py"]
    found = dry(capsys, "--tpu", "--cpu", "--main_training_function", "go", *name, "a", "b")
    assert found[:5] == ["1", "process", "on", "this", "machine:"]
    done = place.python(*found[6:], PYTHONPATH=str(place.path))
    assert done.stdout == "gone ['a', 'b']\n", done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--use_fsdp", "--use_megatron_lm", "script.py"], "Expected one engine. Received: FSDP, Megatron-LM."),
        (["--config_file", "fsdp.yaml", "--ddp_static_graph", "yes", "script.py"], "Received: ddp_static_graph=True (command line), and FSDP"),
        (["--config_file", "unsynced.yaml", "script.py"], "fsdp_sync_module_states=False ("),
        (["--config_file", "sagemaker.yaml", "script.py"], "Expected ec2_instance_type in the launch file."),
        (["--num_proceses", "2", "script.py"], "Received: --num_proceses (command line). Did you mean num_processes?"),
        (["--mixed_precision", "bf61", "script.py"], "(command line, --mixed_precision). Did you mean bf16?"),
        (["--num_processes", "two", "script.py"], "Expected num_processes to be a whole number. Received: 'two'"),
        (["--num_processes"], "Expected a value after --num_processes."),
        (["--cpu"], "Expected a script. Received: none."),
        (["--cpu", "nowhere.py"], "there is no such file"),
        (["--cpu", "-m", "--no_python", "ls"], "Received: --module and --no_python."),
        (["--num_processes", "3", "--num_machines", "2", "--cpu", "script.py"], "Received: num_processes=3 (command line)"),
        (["--num_processes", "2", "--num_machines", "2", "--cpu", "script.py"], "Set --main_process_ip"),
        (["--cpu", "--no_python", "no-such-program"], "Expected a program. Received: no-such-program"),
        (["--multi_gpu", "--num_processes", "2", "script.py"], "Expected GPUs."),
    ],
)
def test_wrong_usage_is_one_message(place, capsys, monkeypatch, args, said):
    monkeypatch.setattr("drivetrain.trainer.cli.launch.is_here", lambda engine: True)
    place.write("fsdp.yaml", "{distributed_type: FSDP, fsdp_config: {fsdp_version: 2}, num_processes: 2}")
    place.write("unsynced.yaml", "{distributed_type: FSDP, fsdp_config: {fsdp_sync_module_states: false}, num_processes: 2}")
    place.write("sagemaker.yaml", "{compute_environment: AMAZON_SAGEMAKER, num_processes: 1}")
    shown = refused(capsys, *args)
    assert said in shown and len(shown.splitlines()) == 1


def test_an_engine_that_is_not_here_is_refused_by_name(place, capsys, monkeypatch):
    monkeypatch.setattr("drivetrain.trainer.cli.launch.is_here", lambda engine: False)
    place.write("fsdp.yaml", "{distributed_type: FSDP, fsdp_config: {fsdp_version: 2}, num_processes: 2}")
    for args, said in (
        (["--config_file", "fsdp.yaml"], "distributed_type=FSDP"),
        (["--use_deepspeed"], "Received: use_deepspeed=True (command line). The engine DeepSpeed is not part"),
        (["--zero_stage", "2"], "Received: --zero_stage (command line). The engine DeepSpeed is not part"),
    ):
        assert said in refused(capsys, *args, "script.py")
    monkeypatch.setattr("drivetrain.trainer.cli.launch.is_here", lambda engine: True)
    assert "Expected --zero_stage together with its engine." in refused(capsys, "--zero_stage", "2", "script.py")


def test_help_names_every_flag_without_torch(place):
    from drivetrain.trainer.cli.launch_settings import SETTINGS

    code = ("import sys; from drivetrain.trainer.cli.main import main; main(['launch', '--help'])\n"
            "print('heavy', sorted({'torch', 'yaml', 'jsonargparse'} & set(sys.modules)))")  # fmt: skip
    done = place.python("-c", code)
    assert done.stdout.splitlines()[-1] == "heavy []", done.stderr
    assert all(f"--{name}" in done.stdout for name, row in SETTINGS.items() if row.flag)
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_old_launchers_stay_usable(place):
    """torch.distributed.launch, the oldest, which adds an argument; tests/trainer/test_launching.py has torchrun."""
    done = place.python("-m", "torch.distributed.launch", "--nproc_per_node", "2", "--master_port", str(free_port()), "script.py",
                        ACCELERATE_USE_CPU="true", ACCELERATE_MIXED_PRECISION="bf16")  # fmt: skip
    assert ranks(place) == [f"{rank}: 2 cpu bf16 1 NO __main__ ['--local-rank={rank}']" for rank in (0, 1)], done.stderr
