"""Modules of torch.nn that emitted code uses as they are: how each is made with local sizes, and when a call is one.

A module is used as it is where its operators read its own parameters, unchanged, and one tensor besides.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autoshard.passes.emit_helpers import BATCH_NORM_RESULTS
from autoshard.passes.local import LocalNode, LocalStage, Ref, StoredTensor

Size = Callable[[Any], str]
Stored = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class LeafKind:
    """One class. name: "Linear". target: its operator. operand: the argument that is not the module's own.

    make: (stored tensors by their names in the module, the operator's arguments or {}, sizes as text) -> constructor
    arguments. own: operator's argument -> the module's attribute.
    """

    name: str
    target: str
    operand: str
    own: Mapping[str, str]
    make: Callable[[Stored, Mapping[str, Any], Size], list[str]]


@dataclass(frozen=True)
class Match:
    """A call that is the module's own. groups: process groups for a helper that stands for the module."""

    node: LocalNode
    operands: tuple[str, ...]
    results: tuple[str | None, ...]
    groups: tuple[str, ...] = ()


def _bias(stored: Stored) -> list[str]:
    return [] if "bias" in stored else ["bias=False"]


def _linear(stored: Stored, arguments: Mapping[str, Any], size: Size) -> list[str]:
    rows, columns = stored["weight"].dims
    return [size(columns), size(rows), *_bias(stored)]


def _embedding(stored: Stored, arguments: Mapping[str, Any], size: Size) -> list[str]:
    rows, columns = stored["weight"].dims
    padding = arguments.get("padding_idx", -1)
    return [size(rows), size(columns), *([f"padding_idx={padding}"] if padding >= 0 else [])]


def _layer_norm(stored: Stored, arguments: Mapping[str, Any], size: Size) -> list[str]:
    shape = [size(extent) for extent in stored["weight"].dims]
    eps = arguments.get("eps", 1e-5)
    written = shape[0] if len(shape) == 1 else f"({', '.join(shape)})"
    return [written, *([f"eps={eps!r}"] if eps != 1e-5 else []), *_bias(stored)]


def _rms_norm(stored: Stored, arguments: Mapping[str, Any], size: Size) -> list[str]:
    shape = [size(extent) for extent in stored["weight"].dims]
    eps = arguments.get("eps")
    written = shape[0] if len(shape) == 1 else f"({', '.join(shape)})"
    return [written, *([f"eps={eps!r}"] if eps is not None else [])]


def _batch_norm(stored: Stored, arguments: Mapping[str, Any], size: Size) -> list[str]:
    some = stored.get("weight") or next(iter(stored.values()))
    eps, momentum = arguments.get("eps", 1e-5), arguments.get("momentum", 0.1)
    return [
        size(some.dims[0]),
        *([f"eps={eps!r}"] if eps != 1e-5 else []),
        *([f"momentum={momentum!r}"] if momentum != 0.1 else []),
        *([] if "weight" in stored else ["affine=False"]),
        *([] if "running_mean" in stored else ["track_running_stats=False"]),
    ]


def _group_norm(stored: Stored, arguments: Mapping[str, Any], size: Size) -> list[str]:
    channels = stored["weight"].dims[0]
    eps = arguments.get("eps", 1e-5)
    groups = arguments.get("num_groups", 1)
    return [size(type(channels)(groups, channels.axes)), size(channels), *([f"eps={eps!r}"] if eps != 1e-5 else [])]


def _convolution(stored: Stored, arguments: Mapping[str, Any], size: Size) -> list[str]:
    out, inside, *kernel = stored["weight"].dims
    groups = arguments.get("groups", 1)
    sizes = [extent.size for extent in kernel]
    if groups == 1:
        written = [size(inside), size(out)]
    else:  # groups are split with the channels
        written = [size(type(out)(inside.size * groups, out.axes, out.even)), size(out)]
    written.append(_one(sizes))
    for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
        given = arguments.get(name, default)
        given = list(given) if isinstance(given, (tuple, list)) else given
        given = given if isinstance(given, str) else _one(given if isinstance(given, list) else [given] * len(sizes))
        if given != str(default):
            written.append(f'{name}="{given}"' if isinstance(arguments.get(name), str) else f"{name}={given}")
    local = size(type(out)(groups, out.axes, out.even))
    return [*written, *([f"groups={local}"] if groups != 1 else []), *_bias(stored)]


def _one(sizes: Sequence[int]) -> str:
    sizes = list(sizes)
    return str(sizes[0]) if len(set(sizes)) == 1 else f"({', '.join(map(str, sizes))})"


_WEIGHTS = {"weight": "weight", "bias": "bias"}
_NORM = {**_WEIGHTS, "running_mean": "running_mean", "running_var": "running_var"}
_FUNCTIONAL_NORM = "aten._native_batch_norm_legit_functional.default"

LEAVES: Mapping[str, LeafKind] = MappingProxyType(
    {
        f"torch.nn.modules.{kind}": leaf
        for kind, leaf in (
            ("linear.Linear", LeafKind("Linear", "aten.linear.default", "input", _WEIGHTS, _linear)),
            (
                "linear.NonDynamicallyQuantizableLinear",
                LeafKind("Linear", "aten.linear.default", "input", _WEIGHTS, _linear),
            ),
            ("sparse.Embedding", LeafKind("Embedding", "aten.embedding.default", "indices", _WEIGHTS, _embedding)),
            (
                "normalization.LayerNorm",
                LeafKind("LayerNorm", "aten.layer_norm.default", "input", _WEIGHTS, _layer_norm),
            ),
            ("normalization.RMSNorm", LeafKind("RMSNorm", "aten.rms_norm.default", "input", _WEIGHTS, _rms_norm)),
            (
                "normalization.GroupNorm",
                LeafKind("GroupNorm", "aten.group_norm.default", "input", _WEIGHTS, _group_norm),
            ),
            *(
                (f"conv.Conv{n}d", LeafKind(f"Conv{n}d", f"aten.conv{n}d.default", "input", _WEIGHTS, _convolution))
                for n in (1, 2, 3)
            ),
            *(
                (
                    f"batchnorm.BatchNorm{n}d",
                    LeafKind(f"BatchNorm{n}d", _FUNCTIONAL_NORM, "input", _NORM, _batch_norm),
                )
                for n in (1, 2, 3)
            ),
        )
    }
)


def is_torch(class_name: str) -> bool:
    """Whether a module class is torch's own."""
    return class_name.startswith("torch.nn.")


def matches(kind: LeafKind, run: Sequence[LocalNode], path: str, stage: LocalStage) -> Match | None:
    """The run as a call of the module, None where it does something else or something besides."""
    main = [node for node in run if node.target in (kind.target, "batch_norm")]
    if len(main) != 1:
        return None
    node = main[0]
    extra = [other for other in run if other is not node]
    if node.target == "batch_norm" or kind.target == _FUNCTIONAL_NORM:
        if not all(_is_bookkeeping(other, path, stage) for other in extra):
            return None
    elif extra:
        return None
    names = {name: stored for stored in stage.stored for name in (stored.name, *stored.aliases)}
    for argument, attribute in kind.own.items():
        given, own = node.arguments.get(argument), names.get(f"{path}.{attribute}" if path else attribute)
        if (given is None) != (own is None):
            return None
        if isinstance(given, Ref):
            tensor = stage.tensors[given.name]
            if tensor.kind not in ("parameter", "buffer") or names.get(tensor.attribute) is not own:
                return None
    operand = node.arguments[kind.operand]
    if not isinstance(operand, Ref) or stage.tensors[operand.name].kind in ("parameter", "buffer"):
        return None
    if kind.name == "Embedding" and node.arguments.get("scale_grad_by_freq"):
        return None
    results = node.results
    if kind.target == _FUNCTIONAL_NORM:
        results = (results[BATCH_NORM_RESULTS[0]],)
        if not node.arguments.get("training", True):
            return None
    return Match(node, (operand.name,), results, node.groups)


def _is_bookkeeping(node: LocalNode, path: str, stage: LocalStage) -> bool:
    """Whether a node beside a batch norm only counts batches or stores a running statistic of the module."""
    if node.target == "update":
        return str(node.arguments["buffer"]).startswith(f"{path}.")
    counts = [stage.tensors[name] for name in node.operands()]
    return node.target == "aten.add.Tensor" and all(
        tensor.kind == "buffer" and tensor.attribute == f"{path}.num_batches_tracked" for tensor in counts
    )
