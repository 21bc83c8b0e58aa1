"""A launch on Amazon SageMaker: the training job that a launch file describes, uploaded and submitted by boto3.

The script's folder goes to S3 and is run by the training toolkit that AWS's PyTorch and Hugging Face images hold
("script mode", https://github.com/aws/sagemaker-training-toolkit). A request is a plain dict of the service's
CreateTrainingJob, so that a dry run can print all of it.
"""

from __future__ import annotations

import json
import logging
import re
import tarfile
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...strategies import environment
from .launch_arguments import Launch
from .launch_exports import exports
from .sagemaker_options import image, options, table
from .sources import UsageError

logger = logging.getLogger(__name__)

ACCOUNT = "ACCOUNT"  # stands in a dry run for the number that AWS tells
_POLL = 15.0  # seconds between looks at a job
_ENDS = ("Completed", "Failed", "Stopped")
_LONGEST = 2500  # characters of one hyperparameter, by the service's reference


def is_asked_for(launch: Launch) -> bool:
    """Whether a launch file names SageMaker as the place to run."""
    return bool(launch["compute_environment"] == "AMAZON_SAGEMAKER")


def request(launch: Launch, name: str, *, bucket: str, role: str) -> dict[str, Any]:
    """Return the CreateTrainingJob request; raises UsageError for settings that make no job."""
    given = options(launch)
    region, machine = launch["region"] or "us-east-1", launch["ec2_instance_type"]
    output = given.get("output_path") or f"s3://{bucket}/"
    algorithm = {"TrainingImage": image(launch, region), "TrainingInputMode": given.get("input_mode", "File"),
                 "MetricDefinitions": _metrics(launch, given)}  # fmt: skip
    hyperparameters = {**given.get("hyperparameters", {}), **arguments(launch.command.program[1:])}
    hyperparameters |= _toolkit(launch, given, name, region, source_place(launch, name, bucket))
    wanted = {
        "TrainingJobName": name,
        "RoleArn": role,
        "AlgorithmSpecification": algorithm,
        "HyperParameters": {key: _encoded(key, value) for key, value in hyperparameters.items()},
        "InputDataConfig": _inputs(launch),
        "OutputDataConfig": {"S3OutputPath": output, "KmsKeyId": given.get("output_kms_key")},
        "ResourceConfig": {
            "InstanceType": machine, "InstanceCount": launch["num_machines"],
            "VolumeSizeInGB": given.get("volume_size", 30), "VolumeKmsKeyId": given.get("volume_kms_key"),
            "KeepAlivePeriodInSeconds": given.get("keep_alive_period_in_seconds"),
        },
        "Environment": {**given.get("environment", {}), **_told(launch)},
        **_limits(given),
        **_network(given),
        "CheckpointConfig": _checkpoints(given),
        "Tags": _tags(given),
        "RetryStrategy": {"MaximumRetryAttempts": given.get("max_retry_attempts")},
    }  # fmt: skip
    return _without_none(wanted)


def dry(launch: Launch) -> dict[str, Any]:
    """Return the request as a launch would send it, without asking AWS for anything."""
    name = _job_name(launch)
    role = launch["iam_role_name"] or ""
    arn = role if role.startswith("arn:") else f"arn:aws:iam::{ACCOUNT}:role/{role}"
    return request(launch, name, bucket=_bucket(launch, ACCOUNT), role=arn)


def submit(launch: Launch) -> int:
    """Upload the script's folder, submit the job and wait for its end; returns 0 for a job that is completed."""
    session = _session(launch)
    name = _job_name(launch)
    dry(launch)  # whatever is wrong is said before anything is uploaded
    role = launch["iam_role_name"]
    if not role.startswith("arn:"):
        role = session.client("iam").get_role(RoleName=role)["Role"]["Arn"]
    bucket = _bucket(launch, "")
    if bucket.endswith("-"):
        bucket = _bucket(launch, session.client("sts").get_caller_identity()["Account"])
    _upload(session, launch, source_place(launch, name, bucket))
    service = _service(session)
    job = service.create_training_job(**request(launch, name, bucket=bucket, role=role))
    print(f"Submitted: {job['TrainingJobArn']}", flush=True)
    return _waited(service, name) if options(launch).get("wait", True) else 0


def arguments(words: tuple[str, ...]) -> dict[str, Any]:
    """Return a script's arguments as hyperparameters, of which SageMaker makes `--name value` again.

    Raises UsageError for what would not come back as it was: switches without a value and positional arguments.
    """
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("-") or not name.strip("-"):
            raise UsageError(f"Expected arguments as --name value. Received: {word!r}. SageMaker passes no others.")
        if not equals:
            if not rest or re.match(r"-\D", rest[0]):
                raise UsageError(
                    f"Expected a value after {name}. Received: none. SageMaker passes every argument with a value: "
                    "let the script take one, such as true."
                )
            value = rest.pop(0)
        found[name.lstrip("-")] = _typed(value)
    return found


def source_place(launch: Launch, name: str, bucket: str) -> str:
    """Return where the packed folder of the script goes."""
    prefix = options(launch).get("code_location") or f"s3://{bucket}"
    return f"{prefix.rstrip('/')}/{name}/source/sourcedir.tar.gz"


def _typed(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else text


def _encoded(name: str, value: Any) -> str:
    text = json.dumps(value)
    if len(text) > _LONGEST:
        raise UsageError(f"Expected {name} of at most {_LONGEST} characters. Received: {len(text)}. Put it in a file.")
    return text


def _toolkit(launch: Launch, given: dict[str, Any], name: str, region: str, source: str) -> dict[str, Any]:
    """Return what the image's toolkit reads: the script, its folder, and how processes are started there."""
    script = Path(launch.command.program[0])
    settings = {
        "sagemaker_program": script.name, "sagemaker_submit_directory": source, "sagemaker_job_name": name,
        "sagemaker_region": region, "sagemaker_container_log_level": given.get("container_log_level", 20),
    }  # fmt: skip
    distribution = given.get("distribution") or {}
    if not distribution and launch.kind == "DATA_PARALLEL":
        distribution = {"torch_distributed": {"enabled": True}}
    if not distribution and launch.kind == "MODEL_PARALLEL":
        raise UsageError("Expected a distribution. Received: MODEL_PARALLEL. Write it to additional_args.distribution.")
    if not distribution and launch["num_machines"] > 1:
        raise UsageError(
            f"Expected DATA_PARALLEL for several machines. Received: {launch.shown('num_machines')}, "
            f"distributed_type={launch.kind or 'NO'}. Set distributed_type."
        )
    if distribution:
        settings["sagemaker_instance_type"] = launch["ec2_instance_type"]
    return settings | _started_by(distribution)


def _started_by(distribution: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a `distribution`, as SageMaker's SDK has it: by torchrun, DDP, MPI or smdistributed."""
    found: dict[str, Any] = {}
    for kind, content in distribution.items():
        if kind in ("torch_distributed", "pytorchddp"):
            word = "torch_distributed" if kind == "torch_distributed" else "pytorch_ddp"
            found[f"sagemaker_{word}_enabled"] = bool(content.get("enabled"))
        elif kind == "mpi":
            found["sagemaker_mpi_enabled"] = bool(content.get("enabled"))
            if "processes_per_host" in content:
                found["sagemaker_mpi_num_of_processes_per_host"] = content["processes_per_host"]
            found["sagemaker_mpi_custom_mpi_options"] = content.get("custom_mpi_options", "")
        elif kind == "smdistributed" and set(content) == {"dataparallel"}:
            found["sagemaker_distributed_dataparallel_enabled"] = bool(content["dataparallel"].get("enabled"))
            found["sagemaker_distributed_dataparallel_custom_mpi_options"] = content["dataparallel"].get(
                "custom_mpi_options", "")  # fmt: skip
        else:
            raise UsageError(
                f"Expected a distribution torch_distributed, pytorchddp, mpi or smdistributed.dataparallel. "
                f"Received: {kind}: {content}. Use one of these."
            )
    return found


def _told(launch: Launch) -> dict[str, str]:
    """Return the variables of the job's processes: Accelerate's, and what `exports` has for every launch."""
    kept = {name: value for name, value in exports(launch).items() if name != environment.SOURCES}
    kept.pop("CUDA_VISIBLE_DEVICES", None)
    if launch.sources["num_cpu_threads_per_process"] == "OMP_NUM_THREADS":
        del kept["OMP_NUM_THREADS"]  # of this machine
    return {"ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": launch.kind or "NO",
            "ACCELERATE_MIXED_PRECISION": launch["mixed_precision"] or "no",
            "ACCELERATE_DYNAMO_BACKEND": launch["dynamo_backend"].upper(), **kept}  # fmt: skip


def _inputs(launch: Launch) -> list[dict[str, Any]] | None:
    """Return the channels of the inputs file: rows of a channel's name and where its data lies."""
    rows = table(launch, "sagemaker_inputs_file")
    for channel, place in rows:
        if not place.startswith("s3://"):
            raise UsageError(f"Expected data on S3. Received: {channel} at {place}. Upload it and write s3://.")
    return [{"ChannelName": channel, "DataSource": {"S3DataSource": {
        "S3DataType": "S3Prefix", "S3Uri": place, "S3DataDistributionType": "FullyReplicated"}}}
        for channel, place in rows] or None  # fmt: skip


def _metrics(launch: Launch, given: dict[str, Any]) -> list[dict[str, str]] | None:
    rows = [{"Name": name, "Regex": regex} for name, regex in table(launch, "sagemaker_metrics_file")]
    return [*given.get("metric_definitions", []), *rows] or None


def _limits(given: dict[str, Any]) -> dict[str, Any]:
    """Return how long the job may run, and on spot machines how long it may wait for them."""
    longest, patience = given.get("max_run", 86400), given.get("max_wait")
    spot = bool(given.get("use_spot_instances"))
    if patience is not None and not spot:
        raise UsageError(f"Expected max_wait with use_spot_instances. Received: max_wait={patience} alone. Set both.")
    if spot and (patience := patience or longest) < longest:
        raise UsageError(f"Expected max_wait of at least max_run. Received: {patience} and {longest} seconds.")
    return {"EnableManagedSpotTraining": spot or None,
            "StoppingCondition": {"MaxRuntimeInSeconds": longest, "MaxWaitTimeInSeconds": patience}}  # fmt: skip


def _network(given: dict[str, Any]) -> dict[str, Any]:
    places = {"Subnets": given.get("subnets"), "SecurityGroupIds": given.get("security_group_ids")}
    return {"VpcConfig": places if any(places.values()) else None,
            "EnableNetworkIsolation": given.get("enable_network_isolation"),
            "EnableInterContainerTrafficEncryption": given.get("encrypt_inter_container_traffic")}  # fmt: skip


def _checkpoints(given: dict[str, Any]) -> dict[str, Any] | None:
    if "checkpoint_s3_uri" not in given:
        return None
    local = given.get("checkpoint_local_path", "/opt/ml/checkpoints")
    return {"S3Uri": given["checkpoint_s3_uri"], "LocalPath": local}


def _tags(given: dict[str, Any]) -> list[dict[str, str]] | None:
    tags = given.get("tags")
    return [{"Key": key, "Value": str(value)} for key, value in tags.items()] if isinstance(tags, dict) else tags


def _job_name(launch: Launch) -> str:
    """Return a name that no job has had: at most 63 letters, digits and hyphens."""
    base = re.sub(r"[^a-zA-Z0-9]+", "-", launch["base_job_name"] or Path(launch.command.program[0]).stem).strip("-")
    moment = datetime.now(timezone.utc)
    return f"{base[:38].rstrip('-') or 'job'}-{moment:%Y-%m-%d-%H-%M-%S}-{moment.microsecond // 1000:03d}"


def _bucket(launch: Launch, account: str) -> str:
    """Return the bucket for source and results: that of the launch file, else the account's default for SageMaker."""
    own = options(launch).get("code_location") or options(launch).get("output_path")
    return own.removeprefix("s3://").split("/")[0] if own else f"sagemaker-{launch['region'] or 'us-east-1'}-{account}"


def _session(launch: Launch) -> Any:
    try:
        import boto3
    except ImportError:
        raise UsageError(
            "Expected boto3 to talk to AWS. Received: it is not installed. Run pip install 'drivetrain[sagemaker]'."
        ) from None
    keys = {"aws_access_key_id": launch["aws_access_key_id"], "aws_secret_access_key": launch["aws_secret_access_key"]}
    return boto3.Session(profile_name=launch["profile"], region_name=launch["region"] or "us-east-1", **keys)


def _service(session: Any) -> Any:
    return session.client("sagemaker")


def _upload(session: Any, launch: Launch, place: str) -> None:
    """Pack the folder of the script and put it to S3; the account's default bucket is made where it is missing."""
    bucket, _, key = place.removeprefix("s3://").partition("/")
    storage = session.client("s3")
    if bucket.startswith("sagemaker-") and bucket not in [one["Name"] for one in storage.list_buckets()["Buckets"]]:
        region = session.region_name
        where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        storage.create_bucket(Bucket=bucket, **where)
    with tempfile.TemporaryFile() as packed:
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.add(Path(launch.command.program[0]).parent, arcname="", filter=_packed)
        packed.seek(0)
        storage.upload_fileobj(packed, bucket, key)
    logger.info("Uploaded: %s", place)


def _packed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = set(Path(member.name).parts)
    return None if parts & {".git", "__pycache__", ".venv", ".ipynb_checkpoints"} else member


def _waited(service: Any, name: str, *, poll: float = _POLL) -> int:
    """Tell of the job until it ends; the exit code is 0 for a completed one, else 1."""
    said = ""
    while True:
        job = service.describe_training_job(TrainingJobName=name)
        state = f"{job['TrainingJobStatus']}, {job.get('SecondaryStatus', '')}".rstrip(", ")
        if state != said:
            print(f"{name}: {state}", flush=True)
        if job["TrainingJobStatus"] in _ENDS:
            break
        said = state
        time.sleep(poll)
    if job["TrainingJobStatus"] == "Completed":
        print(f"Model: {job.get('ModelArtifacts', {}).get('S3ModelArtifacts', 'none')}")
        return 0
    print(f"{job.get('FailureReason', 'No reason was given.')} Its log: /aws/sagemaker/TrainingJobs, CloudWatch.")
    return 1


def _without_none(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {key: _without_none(item) for key, item in value.items() if item is not None}
    return {key: item for key, item in kept.items() if item != {}}
