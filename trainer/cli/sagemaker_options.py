"""What a launch file may say of a SageMaker job beyond its own keys: estimator arguments, tables, images of AWS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .launch_arguments import Launch
from .launch_settings import nearest
from .sources import UsageError

# Arguments of the SDK's estimators that a job has a place for; in the launch file below additional_args.
_KNOWN = {
    "output_path": str, "code_location": str, "volume_size": int, "max_run": int, "max_wait": int,
    "use_spot_instances": bool, "checkpoint_s3_uri": str, "checkpoint_local_path": str, "environment": dict,
    "hyperparameters": dict, "tags": (list, dict), "subnets": list, "security_group_ids": list,
    "keep_alive_period_in_seconds": int, "encrypt_inter_container_traffic": bool, "enable_network_isolation": bool,
    "volume_kms_key": str, "output_kms_key": str, "metric_definitions": list, "distribution": dict,
    "max_retry_attempts": int, "input_mode": str, "container_log_level": int, "wait": bool,
}  # fmt: skip
_REGISTRY = "763104351884"
_REGISTRIES = {  # regions whose images lie in an account of their own
    "af-south-1": "626614931356", "ap-east-1": "871362719292", "ap-northeast-3": "364406365360",
    "ap-south-2": "772153158452", "ap-southeast-3": "907027046896", "ap-southeast-4": "457447274322",
    "ca-west-1": "204538143572", "cn-north-1": "727897471807", "cn-northwest-1": "727897471807",
    "eu-central-2": "380420809688", "eu-south-1": "692866216735", "eu-south-2": "503227376785",
    "il-central-1": "780543022126", "me-central-1": "914824155844", "me-south-1": "217643126080",
    "us-gov-east-1": "446045086412", "us-gov-west-1": "442386744353",
}  # fmt: skip
_HUGGING_FACE = {  # (PyTorch, transformers) → Python and the end of the image's tag, which no rule gives
    ("1.10.2", "4.17.0"): ("py38", "cu113-ubuntu20.04"), ("1.13.1", "4.26.0"): ("py39", "cu117-ubuntu20.04"),
    ("2.0.0", "4.28.1"): ("py310", "cu118-ubuntu20.04"), ("2.1.0", "4.36.0"): ("py310", "cu121-ubuntu20.04"),
    ("2.5.1", "4.49.0"): ("py311", "cu124-ubuntu22.04"),
}  # fmt: skip


def check(launch: Launch) -> None:
    """Raise UsageError for a launch that SageMaker cannot run."""
    switches = launch.command.switches & {"module", "no_python"}
    if switches:
        raise UsageError(f"Expected a Python script for SageMaker. Received: --{min(switches)}. Name a script.")
    words = launch.command.program
    if not words or not Path(words[0]).is_file() or not words[0].endswith(".py"):
        received = words[0] if words else "none"
        raise UsageError(f"Expected a Python script for SageMaker. Received: {received}. Name a file that ends in .py.")
    for name in ("ec2_instance_type", "iam_role_name"):
        if not launch[name]:
            raise UsageError(f"Expected {name} in the launch file. Received: none. Run drivetrain config.")
    options(launch)


def options(launch: Launch) -> dict[str, Any]:
    """Return additional_args, checked."""
    given = launch["additional_args"] or {}
    for name, value in given.items():
        if name not in _KNOWN:
            raise UsageError(
                f"Expected a known key. Received: additional_args.{name} ({launch.sources['additional_args']}). "
                f"{nearest(name, _KNOWN)}"
            )
        kind: Any = _KNOWN[name]
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)):
            raise UsageError(f"Expected additional_args.{name} to be {_called(kind)}. Received: {value!r}.")
    return {name: value for name, value in given.items() if value is not None}


def table(launch: Launch, name: str) -> list[tuple[str, str]]:
    """Return the rows of a file of two columns divided by a tab, below its line of titles."""
    if not launch[name]:
        return []
    path = Path(launch[name]).expanduser()
    if not path.is_file():
        raise UsageError(f"Expected a file. Received: {launch.shown(name)}, and there is no such file.")
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [(number, line.split("\t")) for number, line in enumerate(lines, 1) if number > 1 and line.strip()]
    for number, row in rows:
        if len(row) != 2:
            raise UsageError(f"Expected two columns divided by a tab. Received: {path}:{number} with {len(row)}.")
    return [(row[0].strip(), row[1].strip()) for _, row in rows]


def image(launch: Launch, region: str) -> str:
    """Return the image to run: image_uri, else AWS's for the versions of PyTorch, transformers and Python given."""
    if launch["image_uri"]:
        return str(launch["image_uri"])
    torch, transformers, python = launch["pytorch_version"], launch["transformers_version"], launch["py_version"]
    kind = launch["ec2_instance_type"].split(".")[1] if "." in launch["ec2_instance_type"] else ""
    if not torch or kind.startswith(("trn", "inf")):
        raise UsageError(
            f"Expected image_uri. Received: none, pytorch_version={torch}, ec2_instance_type="
            f"{launch['ec2_instance_type']}. Write an image that has drivetrain, or pytorch_version and py_version."
        )
    processor = "gpu" if kind.startswith(("p", "g")) else "cpu"
    end = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    registry = f"{_REGISTRIES.get(region, _REGISTRY)}.dkr.ecr.{region}.{end}"
    if not transformers:
        return f"{registry}/pytorch-training:{torch}-{processor}-{python or 'py312'}"
    if (torch, transformers) not in _HUGGING_FACE or processor == "cpu":
        raise UsageError(
            f"Expected image_uri. Received: none, and no image is known for pytorch_version={torch}, "
            f"transformers_version={transformers} on {processor}. Look it up in AWS's list of Deep Learning Containers."
        )
    own, tail = _HUGGING_FACE[torch, transformers]
    tag = f"{torch}-transformers{transformers}-{processor}-{python or own}-{tail}"
    return f"{registry}/huggingface-pytorch-training:{tag}"


def _called(kind: Any) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join({str: "text", int: "a whole number", bool: "true or false", list: "a list",
                        dict: "keys and values"}[one] for one in kinds)  # fmt: skip
