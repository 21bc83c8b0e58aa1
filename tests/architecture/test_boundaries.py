"""Who may know what: the environment, the engine, pickles."""

from __future__ import annotations

import ast

import pytest

from drivetrain.tests.architecture.source import sources

# Where other libraries' files are read, as torch's reader of plain data does, and written where a user asks for that.
READS_FOREIGN_FILES = {"trainer/foreign_checkpoints.py", "strategies/torch_files.py"}
WRITES_FOREIGN_FILES = {"strategies/torch_files.py"}
SENDS_BETWEEN_PROCESSES = {"strategies/world.py"}  # messages between the live processes of one run, never files
# The index of torch's sharded checkpoints is a pickle: an unpickler that knows torch's records and nothing else reads it.
READS_FOREIGN_INDEXES = {"strategies/checkpoint/shard_index.py"}
EVERY = pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)


@EVERY
def test_only_the_environment_module_reads_the_environment(source):
    if source.name == "strategies/environment.py":
        return
    for node in ast.walk(source.tree):
        text = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.ImportFrom)) else ""
        forbidden = text in ("os.environ", "os.getenv", "os.putenv") or (
            isinstance(node, ast.ImportFrom) and node.module == "os" and "environ" in text
        )
        assert not forbidden, f"{source.name}:{node.lineno}: ask strategies/environment.py"


@EVERY
def test_no_branch_on_the_engine_outside_strategies(source):
    """`distributed_type` is a label for users: what an engine does differently is a method of its strategy."""
    if source.folder == "strategies":
        return
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Compare, ast.Match)):
            text = ast.unparse(node.subject if isinstance(node, ast.Match) else node)
            assert "distributed_type" not in text and "DistributedType" not in text, f"{source.name}:{node.lineno}"


@EVERY
def test_no_engine_is_asked_for_by_class_outside_strategies(source):
    if source.folder == "strategies":
        return
    engines = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            names = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node.args[1])}
            assert not names & engines, f"{source.name}:{node.lineno}"


@EVERY
def test_nothing_is_pickled_or_unpickled(source):
    """No file that is loaded can run code: tensors are safetensors, the rest is JSON."""
    for imported in source.imports() if source.name not in SENDS_BETWEEN_PROCESSES | READS_FOREIGN_INDEXES else ():
        assert imported.module.split(".")[0] not in ("pickle", "cloudpickle", "dill", "marshal", "shelve"), (
            f"{source.name}:{imported.line}"
        )
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "torch.save" and source.name in WRITES_FOREIGN_FILES:
                continue
            if name == "torch.load" and source.name in READS_FOREIGN_FILES:
                options = {option.arg: ast.unparse(option.value) for option in node.keywords}
                assert options.get("weights_only") == "True", f"{source.name}:{node.lineno}"
                continue
            assert name not in ("torch.load", "torch.save", "eval", "exec"), f"{source.name}:{node.lineno}: {name}"


@EVERY
def test_nothing_happens_at_import(source):
    """Statements of a module define; they do not act."""
    for node in source.tree.body:
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            assert False, f"{source.name}:{node.lineno}: {ast.unparse(node)}"
        assert not isinstance(node, (ast.For, ast.While, ast.With)), f"{source.name}:{node.lineno}"


@EVERY
def test_annotations_are_never_evaluated(source):
    """`from __future__ import annotations` in every file: new syntax in annotations works on Python 3.10."""
    if not source.tree.body:
        return
    imported = [node for node in source.tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    only_a_docstring = len(source.tree.body) == 1 and ast.get_docstring(source.tree)
    assert imported or only_a_docstring, source.name
