"""Launches on SageMaker: the request, and a job that is really uploaded and submitted, to a server of AWS's API here."""

from __future__ import annotations

import io
import json
import tarfile

import pytest

from drivetrain.trainer.cli import sagemaker
from drivetrain.trainer.cli.launch_file import load
from drivetrain.trainer.cli.main import main

FILE = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: DATA_PARALLEL
ec2_instance_type: ml.g5.12xlarge
iam_role_name: trainer
image_uri: 1234.dkr.ecr.eu-west-1.amazonaws.com/train:1
region: eu-west-1
num_machines: 2
base_job_name: my_job
mixed_precision: bf16
sagemaker_inputs_file: inputs.tsv
sagemaker_metrics_file: metrics.tsv
gradient_accumulation_steps: 4
dynamo_config: {dynamo_backend: INDUCTOR}
additional_args:
  use_spot_instances: true
  max_run: 3600
  max_wait: 7200
  volume_size: 50
  checkpoint_s3_uri: s3://data/checkpoints
  environment: {TOKEN: abc}
  hyperparameters: {seed: 7}
  tags: {team: vision}
  subnets: [subnet-1]
  security_group_ids: [sg-1]
  max_retry_attempts: 3
"""
ARGUMENTS = ["--lr", "1e-4", "--name=a b", "--steps", "10", "--fast", "True", "--offset", "-1", "--id", "007"]
HYPERPARAMETERS = {"lr": 1e-4, "name": "a b", "steps": 10, "fast": True, "offset": -1, "id": "007", "seed": 7}


@pytest.fixture
def folder(home, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(home.path / "hf"))
    home.write("launch.yaml", FILE)
    home.write("inputs.tsv", "channel_name\tdata_location\ntrain\ts3://data/train\nvalidation\ts3://data/val\n")
    home.write("metrics.tsv", "metric_name\tmetric_regex\nloss\tloss=([0-9.]+)\n")
    home.write("work/train.py", "print('training')")
    home.write("work/more.py", "x = 1")
    home.write("work/__pycache__/more.pyc", "")
    return home


@pytest.fixture(scope="module")
def aws():
    """A server that speaks AWS's API, on this machine."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def client(aws, monkeypatch):
    """Clients of that server; everything that this process sends to AWS goes there."""
    for name, value in {"AWS_ENDPOINT_URL": aws, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
                        "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1", "AWS_CONFIG_FILE": "/nowhere",
                        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    import boto3

    session = boto3.Session(region_name="eu-west-1")
    try:
        session.client("iam").create_role(RoleName="trainer", AssumeRolePolicyDocument="{}")
    except session.client("iam").exceptions.EntityAlreadyExistsException:
        pass
    return session.client


def dry(capsys, *args: str) -> dict:
    assert main(["launch", "--config_file", "launch.yaml", "--dry_run", *args]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *args: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["launch", "--config_file", "launch.yaml", *args])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_dry_run_prints_the_whole_request(folder, capsys):
    found = dry(capsys, "work/train.py", *ARGUMENTS)
    name = found["TrainingJobName"]
    assert name.startswith("my-job-2") and len(name) <= 63
    source = f"s3://sagemaker-eu-west-1-ACCOUNT/{name}/source/sourcedir.tar.gz"
    assert {key: json.loads(value) for key, value in found.pop("HyperParameters").items()} == {
        **HYPERPARAMETERS, "sagemaker_program": "train.py", "sagemaker_submit_directory": source, "sagemaker_job_name": name,
        "sagemaker_region": "eu-west-1", "sagemaker_container_log_level": 20, "sagemaker_instance_type": "ml.g5.12xlarge",
        "sagemaker_torch_distributed_enabled": True,
    }  # fmt: skip
    assert found == {
        "TrainingJobName": name, "RoleArn": "arn:aws:iam::ACCOUNT:role/trainer",
        "AlgorithmSpecification": {"TrainingImage": "1234.dkr.ecr.eu-west-1.amazonaws.com/train:1", "TrainingInputMode": "File",
                                   "MetricDefinitions": [{"Name": "loss", "Regex": "loss=([0-9.]+)"}]},
        "InputDataConfig": [
            {"ChannelName": channel, "DataSource": {"S3DataSource": {
                "S3DataType": "S3Prefix", "S3Uri": f"s3://data/{place}", "S3DataDistributionType": "FullyReplicated"}}}
            for channel, place in (("train", "train"), ("validation", "val"))
        ],
        "OutputDataConfig": {"S3OutputPath": "s3://sagemaker-eu-west-1-ACCOUNT/"},
        "ResourceConfig": {"InstanceType": "ml.g5.12xlarge", "InstanceCount": 2, "VolumeSizeInGB": 50},
        "Environment": {"TOKEN": "abc", "ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_MIXED_PRECISION": "bf16",
                        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
                        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
        "EnableManagedSpotTraining": True,
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200},
        "VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
        "CheckpointConfig": {"S3Uri": "s3://data/checkpoints", "LocalPath": "/opt/ml/checkpoints"},
        "Tags": [{"Key": "team", "Value": "vision"}], "RetryStrategy": {"MaximumRetryAttempts": 3},
    }  # fmt: skip


def test_a_job_is_uploaded_and_submitted(folder, client, capsys, monkeypatch):
    requests: list[dict] = []

    def listened(session, launch=None):
        service = session.client("sagemaker")
        service.meta.events.register("before-parameter-build.sagemaker.CreateTrainingJob",
                                     lambda params, **_: requests.append(dict(params)))  # fmt: skip
        return service

    monkeypatch.setattr(sagemaker, "_service", listened)
    assert main(["launch", "--config_file", "launch.yaml", "work/train.py", *ARGUMENTS]) == 0
    (sent,) = requests
    name = sent["TrainingJobName"]
    shown = capsys.readouterr().out
    assert f"Submitted: arn:aws:sagemaker:eu-west-1:123456789012:training-job/{name}" in shown
    assert f"{name}: Completed" in shown and "Model: s3://" in shown
    assert sent["Environment"]["ACCELERATE_MIXED_PRECISION"] == "bf16" and sent["Environment"]["TOKEN"] == "abc"
    job = client("sagemaker").describe_training_job(TrainingJobName=name)
    assert job["RoleArn"] == "arn:aws:iam::123456789012:role/trainer" and job["ResourceConfig"]["InstanceCount"] == 2
    assert job["EnableManagedSpotTraining"] is True and job["StoppingCondition"]["MaxWaitTimeInSeconds"] == 7200
    assert [channel["ChannelName"] for channel in job["InputDataConfig"]] == ["train", "validation"]
    hyperparameters = {key: json.loads(value) for key, value in job["HyperParameters"].items()}
    assert HYPERPARAMETERS.items() <= hyperparameters.items()
    bucket, _, key = hyperparameters["sagemaker_submit_directory"].removeprefix("s3://").partition("/")
    assert bucket == "sagemaker-eu-west-1-123456789012"
    packed = client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert {member.name for member in archive if member.isfile()} == {"train.py", "more.py"}
        assert archive.extractfile("train.py").read() == b"print('training')"


def test_a_failed_job_is_a_failed_launch(capsys):
    class Service:
        answers = [{"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"},
                   {"TrainingJobStatus": "Failed", "SecondaryStatus": "Failed", "FailureReason": "ExitCode 1"}]  # fmt: skip

        def describe_training_job(self, TrainingJobName):  # noqa: N803
            return self.answers.pop(0)

    assert sagemaker._waited(Service(), "job", poll=0.01) == 1
    assert capsys.readouterr().out.splitlines()[:2] == ["job: InProgress, Training", "job: Failed, Failed"]


def test_print_config_shows_each_value_with_its_source_and_the_request_but_no_secret(folder, capsys):
    flags = ["--aws_access_key_id", "AKIA1", "--aws_secret_access_key", "hidden"]
    assert main(["launch", "--config_file", "launch.yaml", "--print-config", *flags, "work/train.py"]) == 0
    shown = capsys.readouterr().out
    assert f"ec2_instance_type: ml.g5.12xlarge  # {folder.path / 'launch.yaml'}" in shown
    assert '#   "EnableManagedSpotTraining": true,' in shown and "hidden" not in shown


@pytest.mark.parametrize(
    ("changes", "image"),
    [
        ("pytorch_version: 2.9.0, py_version: py312", "763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:2.9.0-gpu-py312"),
        ("pytorch_version: 1.10.2, transformers_version: 4.17.0, py_version: py38", "763104351884.dkr.ecr.eu-west-1.amazonaws.com/"
         "huggingface-pytorch-training:1.10.2-transformers4.17.0-gpu-py38-cu113-ubuntu20.04"),
        ("pytorch_version: 2.9.0, ec2_instance_type: ml.m5.large, region: cn-north-1",
         "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch-training:2.9.0-cpu-py312"),
    ],
)  # fmt: skip
def test_an_image_by_its_versions(folder, capsys, changes, image):
    plain = "compute_environment: AMAZON_SAGEMAKER, distributed_type: 'NO', iam_role_name: arn:aws:iam::1:role/x"
    defaults = "" if "ec2" in changes else ", ec2_instance_type: ml.p3.2xlarge, region: eu-west-1"
    folder.write("launch.yaml", f"{{{plain}, {changes}{defaults}}}")
    found = dry(capsys, "work/train.py")
    assert found["AlgorithmSpecification"]["TrainingImage"] == image and found["RoleArn"] == "arn:aws:iam::1:role/x"
    assert "sagemaker_torch_distributed_enabled" not in found["HyperParameters"]


@pytest.mark.parametrize(
    ("old", "new", "args", "said"),
    [
        ("", "", ["--flag"], "Expected a value after --flag."),
        ("", "", ["--flag", "--lr", "1"], "Expected a value after --flag."),
        ("", "", ["positional"], "Received: 'positional'. SageMaker passes no others."),
        ("use_spot_instances: true", "use_spot_instances: false", [], "max_wait=7200 alone"),
        ("max_wait: 7200", "max_wait: 60", [], "Expected max_wait of at least max_run. Received: 60 and 3600"),
        ("volume_size", "volumesize", [], "Received: additional_args.volumesize ("),
        ("volume_size: 50", "volume_size: big", [], "Expected additional_args.volume_size to be a whole number. Received: 'big'."),
        ("iam_role_name: trainer", "", [], "Expected iam_role_name in the launch file."),
        ("image_uri: 1234.dkr.ecr.eu-west-1.amazonaws.com/train:1", "", [], "Expected image_uri. Received: none"),
        ("DATA_PARALLEL", "'NO'", [], "Expected DATA_PARALLEL for several machines."),
        ("DATA_PARALLEL", "MODEL_PARALLEL", [], "Received: MODEL_PARALLEL. Write it to additional_args.distribution."),
        ("inputs.tsv", "nowhere.tsv", [], "sagemaker_inputs_file=nowhere.tsv ("),
    ],
)  # fmt: skip
def test_what_makes_no_job_is_said_before_anything_is_sent(folder, capsys, old, new, args, said):
    folder.write("launch.yaml", FILE.replace(old, new) if old else FILE)
    assert said in refused(capsys, "work/train.py", *args)


def test_other_wrong_usage(folder, capsys):
    assert "Received: --module." in refused(capsys, "-m", "train")
    assert "Name a file that ends in .py." in refused(capsys, "work/nowhere.py")
    folder.write("inputs.tsv", "channel_name\tdata_location\ntrain /local\n")
    assert "inputs.tsv:2 with 1." in refused(capsys, "work/train.py")
    folder.write("inputs.tsv", "channel_name\tdata_location\ntrain\t/local\n")
    assert "Received: train at /local. Upload it" in refused(capsys, "work/train.py")


def test_other_ways_to_start_processes_there(folder, capsys):
    for written, words in (
        ("{smdistributed: {dataparallel: {enabled: true}}}", {"sagemaker_distributed_dataparallel_enabled": True}),
        ("{mpi: {enabled: true, processes_per_host: 4}}", {"sagemaker_mpi_enabled": True, "sagemaker_mpi_num_of_processes_per_host": 4}),
        ("{pytorchddp: {enabled: true}}", {"sagemaker_pytorch_ddp_enabled": True}),
    ):
        folder.write("launch.yaml", f"{FILE}  distribution: {written}\n")
        found = {key: json.loads(value) for key, value in dry(capsys, "work/train.py")["HyperParameters"].items()}
        assert words.items() <= found.items() and "sagemaker_torch_distributed_enabled" not in found
    folder.write("launch.yaml", f"{FILE}  distribution: {{horovod: {{enabled: true}}}}\n")
    assert "Received: horovod: " in refused(capsys, "work/train.py")


def test_files_that_accelerate_writes_for_sagemaker_are_read(folder):
    folder.write("old.yaml", FILE + "profile: default\ngpu_ids: all\npytorch_version: 1.10.2\ntransformers_version: 4.17.0\n"
                 "py_version: py38\nuse_cpu: false\ndebug: false\nenable_cpu_affinity: false\n")  # fmt: skip
    assert load("old.yaml").values["profile"] == "default"
