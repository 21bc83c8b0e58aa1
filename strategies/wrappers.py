"""What libraries put around a user's module, and taking it off; compiling a model by its repeated blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .forwards import restore_forward

_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Returns the user's module inside of what was put around it for several processes.

    `keep_fp32_wrapper=False` also gives its forward back as it was before mixed precision, `keep_torch_compile=False`
    takes torch.compile's wrapper off; `recursive` looks into its submodules too.
    """
    compiled = model if is_compiled_module(model) else None
    module = _stripped(model)
    if recursive:
        for part in list(module.modules()):
            for name, child in list(part.named_children()):
                setattr(part, name, _stripped(child))
    if not keep_fp32_wrapper:
        restore_forward(module)
        _restore_original(module)
    if compiled is not None and keep_torch_compile:
        compiled._orig_mod = module
        return compiled
    return module


def is_compiled_module(module: nn.Module) -> bool:
    """Whether `torch.compile` put a wrapper around a module."""
    return type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether some submodule is compiled, but not the module as a whole."""
    return any(_is_compiled(part) for part in list(module.modules())[1:]) and not _is_compiled(module)


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """A model with each of its repeated blocks compiled apart: much less time to compile, nearly the same speed.

    Repeated blocks are the members of a ModuleList of one class. Parameters are those of the given model, and so are
    their names; a model without such blocks is compiled as a whole.
    """
    if is_repeated_blocks(module):
        blocks = {name: _compiled(child, compile_kwargs) for name, child in module.named_children()}
        return _with_children(module, blocks)
    if not has_repeated_blocks(module):
        whole: nn.Module = _compiled(module, compile_kwargs)
        return whole
    children = {}
    for name, child in module.named_children():
        children[name] = compile_regions(child, **compile_kwargs)
    return _with_children(module, children)


def is_repeated_blocks(module: nn.Module) -> bool:
    """Whether a module is a list of modules of one class."""
    return isinstance(module, nn.ModuleList) and len(module) > 0 and len({type(block) for block in module}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Whether there is a list of modules of one class below a module."""
    return any(is_repeated_blocks(part) for part in list(module.modules())[1:])


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether some parameter is a DTensor, as FSDP2 and tensor parallelism make them."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def is_peft_model(model: Any) -> bool:
    """Whether a model is one of the peft library, be it inside of wrappers."""
    return any(kind.__name__ == "PeftModel" and kind.__module__.startswith("peft.")
               for kind in type(_stripped(model)).__mro__)  # fmt: skip


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """All modules of a model, each after those inside it, the model last; with `return_fqns` pairs (name, module)."""
    found: list[Any] = []

    def visit(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)
        found.append((name, module) if return_fqns else module)

    visit("", model)
    return found


def get_pretty_name(obj: Any) -> str:
    """The qualified name of a class or function, or of an object's class."""
    if not hasattr(obj, "__qualname__") and not hasattr(obj, "__name__"):
        obj = getattr(obj, "__class__", obj)
    return getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or str(obj)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """An attribute of an attribute: `recursive_getattr(model, "encoder.layer")`."""
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """Puts a nested dict into another one, in place, and returns that; values of `source` win."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def _stripped(model: Any) -> Any:
    while True:
        if is_compiled_module(model):
            model = model._orig_mod
        elif isinstance(model, _PARALLEL):
            model = model.module
        else:
            return model


def _restore_original(module: Any) -> None:
    """Puts back a forward that somebody kept as `_original_forward`, as libraries do that wrap it by hand."""
    original = vars(module).pop("_original_forward", None)
    if original is None:
        return
    del module.forward
    if getattr(original, "__func__", None) is not type(module).forward:
        module.forward = original


def _compiled(module: nn.Module, options: dict[str, Any]) -> Any:
    return torch.compile(module, **options)


def _is_compiled(module: nn.Module) -> bool:
    return is_compiled_module(module) or getattr(module, "_compiled_call_impl", None) is not None


def _with_children(module: nn.Module, children: dict[str, nn.Module]) -> nn.Module:
    """A module that shares everything with the given one but its children."""
    new = module.__class__.__new__(module.__class__)
    new.__dict__.update(module.__dict__)
    new._modules = {**module._modules, **children}
    return new
