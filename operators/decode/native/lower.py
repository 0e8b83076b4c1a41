"""Turn a fitted step into a native program: ATen calls become the program's small operations, kernel calls its kernels.

A call without a native form stays a call of PyTorch between two runs of the program, so that one unknown operation costs microseconds and
not the whole program. program.py builds the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from moegraft.operators.decode.cache import StateName
from moegraft.operators.decode.native.fit import Affine, CacheTensor, FittedStep, Place, contiguous_strides, product
from moegraft.operators.decode.native.record import Call, NotRecordableError

ELEMENT_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
}
_ZERO, _ONE = Affine(0), Affine(1)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MOST_ROTARY_COLUMNS = 1024  # of the native operation
Number = float | int | Affine
Operand = Place | Number


@dataclass(slots=True)
class Node:
    """One operation of a program.

    Attributes:
        kind: `small` and `norm` run on one thread, `linear`, `experts`, `router`, `attention`, `paged attention`, `matmul` and
            `recurrent` on all, `call` in PyTorch.
        writes, reads: what it touches, in the order of its native form: results first.
        name: of a small operation, or the rule of a recurrent layer.
        payload: packed weights, specs or the call itself.
    """

    kind: str
    writes: list[Place]
    reads: list[Operand]
    name: str = ""
    numbers: list[float] = field(default_factory=list)
    payload: Any = None

    def storages(self) -> list[int]:
        return [place.storage for place in (*self.writes, *self.reads) if isinstance(place, Place)]


class _Unsupported(NotRecordableError):
    """A call has no native form; an error where PyTorch cannot compute it between two runs of the program either."""


class Lowering:
    """The nodes of a fitted step.

    Args:
        grown: tensors of the cache to which a step appends, by storage after the step: see `CacheTensor`.
        replaced: tensors of the cache that a step replaces by others of their form, whose memory the program overwrites.
    Attributes:
        sized_by_values: whether the size of a result depends on the data, so that a replay may find another than the recorded one.
    """

    def __init__(self, step: FittedStep, grown: Sequence[CacheTensor], replaced: Sequence[StateName]) -> None:
        self._grown = {tensor.after: tensor for tensor in grown}
        self._buffers = {tensor.before for tensor in grown if tensor.before != tensor.after}
        self.storage_bytes = list(step.storage_bytes)
        self.produced = set(step.produced)
        self.nodes: list[Node] = []
        self.sized_by_values = False
        for call in step.calls:
            self._lower(call)
        for name in replaced:
            self.elementwise("copy", step.before[name], step.after[name])
        for tensor in grown:
            if tensor.first is not None:
                self.elementwise("copy", tensor.place(_ZERO, tensor.first.sizes), tensor.first)
        self._write_states_in_place()
        self._gather_linears()
        self._fuse_rotary()

    def temporary(self, dtype: torch.dtype, sizes: Sequence[Affine]) -> Place:
        """Return a new contiguous temporary; at most one size may depend on the position."""
        strides = contiguous_strides(sizes)
        elements = product(sizes[0], strides[0]) if sizes else _ONE
        self.storage_bytes.append(elements.times(dtype.itemsize))
        self.produced.add(len(self.storage_bytes) - 1)
        return Place(len(self.storage_bytes) - 1, dtype, _ZERO, tuple(sizes), strides)

    def small(self, name: str, out: Place, *reads: Operand, numbers: Sequence[float] = ()) -> None:
        """Append an operation whose operands have the sizes that its native form expects."""
        for place in (out, *reads):
            if isinstance(place, Place) and (place.dtype not in ELEMENT_NAMES or place.dims > 6):
                raise _Unsupported(f"programs have no {place.dtype} tensors of {place.dims} dimensions")
        self.nodes.append(Node("small", [out], list(reads), name, list(numbers)))

    def elementwise(self, name: str, out: Place, *reads: Operand) -> None:
        self.small(name, out, *(read.expanded(out.sizes) if isinstance(read, Place) else read for read in reads))

    def copied(self, place: Place, dtype: torch.dtype) -> Place:
        """Return a contiguous copy of the place."""
        copy = self.temporary(dtype, place.sizes)
        self.elementwise("copy", copy, place)
        return copy

    def contiguous(self, place: Place) -> Place:
        """Return the place, or a copy of it with its last dimension contiguous."""
        in_rows = place.dims == 0 or place.sizes[-1] == _ONE or place.strides[-1] == _ONE
        return place if in_rows else self.copied(place, place.dtype)

    def packed(self, place: Place) -> Place:
        """Return the place, or a copy of it that is contiguous in all dimensions."""
        return place if place.is_contiguous else self.copied(place, place.dtype)

    def _lower(self, call: Call) -> None:
        before = len(self.nodes)
        kernel = _KERNELS.get(call.name)
        appends = bool(call.outputs) and call.outputs[0].storage in self._grown and call.name == "cat.default"
        if not appends and any(isinstance(leaf, Place) and leaf.storage in self._buffers for leaf in call.leaves):
            raise NotRecordableError(f"{call.name} reads the cache before the new tokens are in it")
        leaves = [self._in_cache(leaf) for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.form)
        outputs = [self._in_cache(place) for place in call.outputs]
        if kernel is not None:
            kernel(self, args, kwargs)
            return
        if appends:
            self._append(self._grown[call.outputs[0].storage], args[0])
            return
        masked = call.name == "index.Tensor" and any(place.dtype in (torch.bool, torch.uint8) for place in args[1] if place is not None)
        self.sized_by_values |= masked or call.name == "nonzero.default"
        lower = _LOWERINGS.get(call.name)
        try:
            if lower is None:
                raise _Unsupported
            lower(self, args, kwargs, outputs)
        except NotRecordableError:
            del self.nodes[before:]
            reads = [leaf for leaf in leaves if isinstance(leaf, Place)]
            self.nodes.append(Node("call", outputs, list(reads), call.name, payload=(call.target, leaves, call.form)))

    def _in_cache(self, leaf: Any) -> Any:
        """Return where a tensor that the step would allocate for the grown cache is in the cache's buffer."""
        grown = self._grown.get(leaf.storage) if isinstance(leaf, Place) else None
        return leaf if grown is None else grown.translated(leaf)

    def _append(self, grown: CacheTensor, pieces: Sequence[Place]) -> None:
        if len(pieces) != 2 or pieces[0].storage != grown.before:
            raise NotRecordableError("the cache grows in another way than by appending to it")
        new = pieces[1]
        self.elementwise("copy", grown.place(pieces[0].sizes[grown.dim], new.sizes), new)

    def _write_states_in_place(self) -> None:
        """Let recurrent layers write a state where the step copies it, over the state that they read."""
        nodes = self.nodes
        for first, node in enumerate(nodes):
            state = node.writes[-1] if node.kind == "recurrent" else None
            if state is None or state.storage not in self.produced:
                continue
            users = [place for place, other in enumerate(nodes) if state.storage in other.storages()]
            copy = nodes[users[-1]]
            if (
                len(users) != 2
                or copy.name != "copy"
                or copy.reads != [state]
                or copy.writes[0] != replace(state, storage=copy.writes[0].storage, offset=copy.writes[0].offset)
            ):
                continue
            target = copy.writes[0]
            if any(target.storage in other.storages() for other in nodes[first + 1 : users[-1]]):
                continue
            node.writes = [*node.writes[:-1], target]
            nodes[users[-1]] = Node("none", [], [])
        self.nodes = [node for node in nodes if node.kind != "none"]

    def _gather_linears(self) -> None:
        """Move linear layers behind one with the same input: they are computed as one operation."""
        position = 0
        while position < len(self.nodes):
            node = self.nodes[position]
            position += 1
            if node.kind != "linear":
                continue
            (x,) = node.reads
            assert isinstance(x, Place)
            packed = node.payload[0]
            for later in range(position, len(self.nodes)):
                other = self.nodes[later]
                if any(place.storage == x.storage for place in other.writes):
                    break
                if other.kind != "linear" or other.reads != [x]:
                    continue
                if other.payload[0].weight_type != packed.weight_type:
                    continue
                targets = {place.storage for place in other.writes}
                if any(targets & set(between.storages()) for between in self.nodes[position:later]):
                    continue
                node.payload = [*node.payload, *other.payload]
                node.writes = [*node.writes, *other.writes]
                self.nodes[later] = Node("none", [], [])
            self.nodes = [each for each in self.nodes if each.kind != "none"]

    def _fuse_rotary(self) -> None:
        """Make one operation of `x * cos + cat(-x[..., half:], x[..., :half]) * sin`, whose parts nothing else uses."""
        users: dict[int, int] = {}
        for node in self.nodes:
            for storage in set(node.storages()):
                users[storage] = users.get(storage, 0) + 1
        nodes: list[Node] = []
        for node in self.nodes:
            nodes.append(node)
            if node.name == "add" and (fused := self._rotary(nodes[-6:], users)) is not None:
                nodes[-6:] = [fused]
        self.nodes = nodes

    def _rotary(self, nodes: Sequence[Node], users: Mapping[int, int]) -> Node | None:
        if [node.name for node in nodes] != ["mul", "neg", "copy", "copy", "mul", "add"]:
            return None
        places = [[place for place in (*node.writes, *node.reads) if isinstance(place, Place)] for node in nodes]
        if [len(each) for each in places] != [3, 2, 2, 2, 3, 3]:
            return None
        (plain, x, cos), (negated, second), (front, source), (back, first), (turned, joined, sin), (out, *terms) = places
        columns = x.sizes[-1] if x.dims else _ZERO
        if not columns.fixed or columns.base % 2 or columns.base > _MOST_ROTARY_COLUMNS:
            return None
        half = Affine(columns.base // 2)
        parts = [(x, first, second), (joined, front, back)]
        halves = all(whole.sliced(-1, _ZERO, half) == one and whole.sliced(-1, half, half) == other for whole, one, other in parts)
        inner = {plain.storage: 2, negated.storage: 2, joined.storage: 3, turned.storage: 2}
        unseen = len(inner) == 4 and all(storage in self.produced and users[storage] == count for storage, count in inner.items())
        same_type = all(place.dtype == x.dtype for place in (plain, negated, joined, turned, out))
        apart = out.storage not in (x.storage, cos.storage, sin.storage)
        rows = all(place.strides[-1] == _ONE and place.dtype.is_floating_point for place in (out, x, cos, sin))
        if not (halves and unseen and same_type and apart and rows) or source != negated or terms not in ([plain, turned], [turned, plain]):
            return None
        return Node("small", [out], [x, cos, sin], "rotary")


Lower = Callable[[Lowering, Sequence[Any], Mapping[str, Any], Sequence[Place]], None]
LowerKernel = Callable[[Lowering, Sequence[Any], Mapping[str, Any]], None]
_LOWERINGS: dict[str, Lower] = {}


def _lowers(*names: str) -> Callable[[Lower], Lower]:
    def register(lower: Lower) -> Lower:
        _LOWERINGS.update(dict.fromkeys(names, lower))
        return lower

    return register


def _operand(value: Any) -> Operand:
    if isinstance(value, Place | bool | int | float | Affine):
        return value
    raise _Unsupported


_UNARY = {name: name for name in (
    "neg", "abs", "exp", "log", "log1p", "sin", "cos", "sqrt", "rsqrt", "reciprocal", "sigmoid", "silu", "relu", "tanh", "floor", "sign",
)} | {"logical_not": "not"}  # fmt: skip
_BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "maximum": "maximum", "minimum": "minimum",
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "logical_and": "and", "logical_or": "or", "logical_xor": "xor",
    "floor_divide": "floor_div",
}  # fmt: skip
_BITWISE = {
    "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "__and__": "and", "__or__": "or", "__xor__": "xor",
    "bitwise_not": "not",
}  # fmt: skip


def _elementwise(name: str) -> Lower:
    def lower(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
        to.elementwise(name, outputs[0], *map(_operand, args))

    return lower


def _binary(name: str) -> Lower:
    def lower(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
        if kwargs.get("alpha", 1) != 1 or len(args) > 2 or kwargs.get("rounding_mode") is not None:
            raise _Unsupported
        are_complex = [isinstance(value, Place) and value.dtype == torch.complex64 for value in args]
        if name == "mul" and all(are_complex):
            return _complex_product(to, args[0], args[1], outputs[0])
        if name == "mul" and any(are_complex):
            factor = _operand(args[are_complex.index(False)])
            for part, target in zip(_parts(args[are_complex.index(True)]), _parts(outputs[0]), strict=True):
                to.elementwise("mul", target, part, factor)
            return None
        to.elementwise(name, outputs[0], _operand(args[0]), _operand(args[1]))

    return lower


def _bitwise(name: str) -> Lower:
    def lower(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
        if outputs[0].dtype != torch.bool:
            raise _Unsupported
        to.elementwise(name, outputs[0], *map(_operand, args))

    return lower


for _names, _lower_as in ((_UNARY, _elementwise), (_BINARY, _binary), (_BITWISE, _bitwise)):
    for _aten, _native in _names.items():
        for _form in ("default",) if _names is _UNARY else ("Tensor", "Scalar", "default"):
            _LOWERINGS[f"{_aten}.{_form}"] = _LOWERINGS[f"{_aten}_.{_form}"] = _lower_as(_native)


@_lowers("rsub.Scalar")
def _rsub(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    if len(args) > 2 or kwargs:
        raise _Unsupported
    to.elementwise("sub", outputs[0], _operand(args[1]), args[0])


@_lowers("pow.Tensor_Scalar", "square.default")
def _pow(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    exponent = _argument(args, kwargs, 1, "exponent", 2)
    named = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent == 2:
        to.elementwise("mul", outputs[0], args[0], args[0])
    elif exponent in named:
        to.elementwise(named[exponent], outputs[0], args[0])
    elif isinstance(exponent, int | float):
        to.elementwise("pow", outputs[0], args[0], exponent)
    else:
        raise _Unsupported


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _clamp(*bounds: tuple[str, int, str]) -> Lower:
    """Return the lowering of a call with bounds: the operation of each, and the place and name of its argument."""

    def lower(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
        source: Operand = args[0]
        for operation, place, name in bounds:
            bound = _argument(args, kwargs, place, name)
            if bound is not None:
                to.elementwise(operation, outputs[0], source, _operand(bound))
                source = outputs[0]

    return lower


_LOWERINGS["clamp.default"] = _clamp(("maximum", 1, "min"), ("minimum", 2, "max"))
_LOWERINGS["clamp_min.default"] = _clamp(("maximum", 1, "min"))
_LOWERINGS["clamp_max.default"] = _clamp(("minimum", 1, "max"))


@_lowers("gelu.default")
def _gelu(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    to.elementwise("gelu_tanh" if kwargs.get("approximate", "none") == "tanh" else "gelu", outputs[0], args[0])


@_lowers("softplus.default")
def _softplus(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    beta, threshold = _argument(args, kwargs, 1, "beta", 1), _argument(args, kwargs, 2, "threshold", 20)
    to.elementwise("softplus", outputs[0], args[0], _operand(beta), _operand(threshold))


@_lowers("masked_fill.Scalar", "masked_fill_.Scalar", "masked_fill.Tensor", "masked_fill_.Tensor")
def _masked_fill(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    to.elementwise("where", outputs[0], args[1], _operand(args[2]), args[0])


_LOWERINGS |= dict.fromkeys(("_to_copy.default", "clone.default"), _elementwise("copy"))
_LOWERINGS |= dict.fromkeys(("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar"), _elementwise("where"))


@_lowers("copy_.default")
def _copy_into(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    if args[0] != args[1]:  # a kernel has written it there
        to.elementwise("copy", args[0], args[1])


def _fill(number: float | tuple[int, str]) -> Lower:
    """Return the lowering of a call that fills its result with a number, or with the argument of a place and name."""

    def lower(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
        value = _argument(args, kwargs, *number) if isinstance(number, tuple) else number
        to.elementwise("copy", outputs[0], _operand(value))

    return lower


_LOWERINGS |= dict.fromkeys(("zeros.default", "new_zeros.default", "zeros_like.default", "zero_.default"), _fill(0))
_LOWERINGS |= dict.fromkeys(("ones.default", "new_ones.default", "ones_like.default"), _fill(1))
_LOWERINGS |= dict.fromkeys(("full.default", "full_like.default"), _fill((1, "fill_value")))
_LOWERINGS |= {"new_full.default": _fill((2, "fill_value")), "fill_.Scalar": _fill((1, "value")), "scalar_tensor.default": _fill((0, "s"))}


@_lowers("cat.default", "concat.default", "stack.default")
def _cat(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    out = outputs[0]
    pieces = args[0]
    dim = _argument(args, kwargs, 1, "dim", 0) % out.dims
    stacked = bool(pieces) and pieces[0].dims < out.dims
    start = _ZERO
    for piece in pieces:
        if stacked:
            piece = piece.unsqueezed(dim)
        if piece.dims != out.dims:
            raise _Unsupported
        to.elementwise("copy", out.sliced(dim, start, piece.sizes[dim]), piece)
        start = start.plus(piece.sizes[dim])


@_lowers("arange.default", "arange.start", "arange.start_step")
def _arange(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    start, step = (args[0] if len(args) > 1 else 0), (args[2] if len(args) > 2 else 1)
    to.small("arange", outputs[0], _operand(start), _operand(step))


@_lowers("embedding.default")
def _embedding(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    to.small("embedding", outputs[0], args[0], to.packed(args[1]))


@_lowers("index_select.default")
def _index_select(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    x, dim, index = args
    if x.dims != 2 or dim % x.dims or index.dims != 1:
        raise _Unsupported
    to.small("embedding", outputs[0], to.contiguous(x), to.packed(index))


@_lowers("index.Tensor")
def _index_vector(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    x, indices = args
    if x.dims != 1 or len(indices) != 1 or indices[0].dtype != torch.int64:
        raise _Unsupported
    negative, index = (to.temporary(dtype, indices[0].sizes) for dtype in (torch.bool, torch.int64))
    to.elementwise("lt", negative, indices[0], _ZERO)  # these count from the end
    to.elementwise("mul", index, negative, x.sizes[0])
    to.elementwise("add", index, index, indices[0])
    to.small("embedding", outputs[0].unsqueezed(1), x.unsqueezed(1), index)


@_lowers("repeat.default")
def _repeat(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    x, repeats = args
    out = outputs[0]
    if any(isinstance(count, Affine) for count in repeats):
        raise _Unsupported
    tiled = [dim for dim in range(x.dims) if repeats[dim - x.dims] > 1 and x.sizes[dim] != _ONE]
    if len(tiled) > 1:
        raise _Unsupported
    if not tiled:
        to.elementwise("copy", out, x)
        return
    dim = tiled[0] - x.dims
    for count in range(repeats[dim]):
        to.elementwise("copy", out.sliced(dim, x.sizes[dim].times(count), x.sizes[dim]), x)


@_lowers("constant_pad_nd.default")
def _constant_pad(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    x, pads = args[:2]
    out = outputs[0]
    if any(isinstance(pad, Affine) or pad < 0 for pad in pads):
        raise _Unsupported
    to.elementwise("copy", out, _operand(args[2] if len(args) > 2 else 0))
    for dim in range(len(pads) // 2):
        out = out.sliced(-1 - dim, Affine(pads[2 * dim]), x.sizes[-1 - dim])
    to.elementwise("copy", out, x)


def _along_dim(name: str) -> Lower:
    """Return the lowering of a call whose result has the sizes of its operand, and whose second argument is a dimension."""

    def lower(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
        to.small(name, outputs[0].with_last(args[1]), args[0].with_last(args[1]))

    return lower


_LOWERINGS["_softmax.default"] = _along_dim("softmax")
_LOWERINGS["cumsum.default"] = _along_dim("cumsum")


def _reduction(name: str) -> Lower:
    def lower(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
        dims = args[1] if len(args) > 1 else []
        if not isinstance(dims, list | tuple) or len(dims) != 1:
            raise _Unsupported
        out, x = outputs[0], args[0].with_last(dims[0])  # the result as (..., 1)
        to.small(name, out.with_last(dims[0]) if out.dims == x.dims else out.unsqueezed(out.dims), x)

    return lower


_LOWERINGS["sum.dim_IntList"] = _reduction("sum")
_LOWERINGS["mean.dim"] = _reduction("mean")
_LOWERINGS["amax.default"] = _reduction("amax")


@_lowers("topk.default")
def _topk(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    dim, largest = _argument(args, kwargs, 2, "dim", -1), _argument(args, kwargs, 3, "largest", True)
    ordered = _argument(args, kwargs, 4, "sorted", True)
    values, ids = (place.with_last(dim) for place in outputs)
    if values.dtype not in _FLOATS:
        raise _Unsupported
    to.nodes.append(Node("small", [values, ids], [args[0].with_last(dim)], "topk", [float(largest), float(ordered)]))


def _narrowed(place: Place, like: Place) -> Place:
    """Return the place with the sizes of `like` in all dimensions but the last."""
    return replace(place, sizes=(*like.sizes[:-1], place.sizes[-1]))


def _index(to: Lowering, index: Place) -> Place:
    """Return the index in the type that the native operations read."""
    return index if index.dtype == torch.int64 else to.copied(index, torch.int64)


@_lowers("gather.default")
def _gather(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    index = _index(to, args[2]).with_last(args[1])
    to.small("gather", outputs[0].with_last(args[1]), _narrowed(args[0].with_last(args[1]), index), index)


@_lowers("scatter.value", "scatter.src", "scatter_.value", "scatter_.src")
def _scatter(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    if len(args) > 4 or kwargs:
        raise _Unsupported
    x, dim, index, value = args
    if outputs[0].storage != x.storage:
        to.elementwise("copy", outputs[0], x)
    index = _index(to, index).with_last(dim)
    out = _narrowed(outputs[0].with_last(dim), index)
    if isinstance(value, Place):
        to.small("scatter", out, index, _narrowed(value.with_last(dim), index))
    else:
        to.small("scatter", out, index, numbers=[float(value)])


@_lowers("mm.default", "bmm.default", "addmm.default")
def _matmul(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    out = outputs[0]
    bias = args[0] if len(args) == 3 else None
    a, b = args[-2:]
    if kwargs or out.dtype not in _FLOATS or not a.dtype == b.dtype == out.dtype:
        raise _Unsupported
    if bias is not None and (bias.dims > 1 or bias.dtype != out.dtype):
        raise _Unsupported
    a = to.contiguous(a)
    if _ONE not in b.strides[-2:] and _ONE not in b.sizes[-2:]:
        b = to.contiguous(b)
    batched = [place if place.dims == 3 else place.unsqueezed(0) for place in (out, a, b)]
    to.nodes.append(Node("matmul", [batched[0]], [*batched[1:], *([] if bias is None else [bias])]))


@_lowers("native_layer_norm.default")
def _layer_norm(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    x, shape, weight, bias, epsilon = args
    if len(shape) != 1 or kwargs:
        raise _Unsupported
    row = (*x.sizes[:-1], _ONE)
    mean, scale, centred = (to.temporary(torch.float32, sizes) for sizes in (row, row, x.sizes))
    to.small("mean", mean, x)
    to.elementwise("sub", centred, x, mean)
    squares = to.temporary(torch.float32, x.sizes)
    to.elementwise("mul", squares, centred, centred)
    to.small("mean", scale, squares)
    to.elementwise("add", scale, scale, epsilon)
    to.elementwise("rsqrt", scale, scale)
    results = [("mul", scale), *([] if weight is None else [("mul", weight)]), *([] if bias is None else [("add", bias)])]
    for place, (name, other) in enumerate(results, 1):
        to.elementwise(name, outputs[0] if place == len(results) else centred, centred, other)


@_lowers("convolution.default")
def _convolution(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    """A depthwise convolution over few tokens, as recurrent layers have: one product and sum for each of them."""
    x, weight, bias, stride, padding, dilation, transposed, _, groups = args
    out = outputs[0]
    plain = (list(stride), list(padding), list(dilation), transposed) == ([1], [0], [1], False)
    if not plain or x.dims != 3 or weight.sizes[1] != _ONE or groups != weight.sizes[0].base or x.sizes[1] != weight.sizes[0]:
        raise _Unsupported
    if any(size.slope for size in (*out.sizes, *weight.sizes)):
        raise _Unsupported
    width, columns = weight.sizes[2], out.sizes[:2]
    kernel = Place(weight.storage, weight.dtype, weight.offset, (weight.sizes[0], width), (weight.strides[0], weight.strides[2]))
    products, sums = to.temporary(torch.float32, (*columns, width)), to.temporary(torch.float32, (*columns, _ONE))
    for token in range(out.sizes[2].base):
        target = out.sliced(2, Affine(token), _ONE)
        to.elementwise("mul", products, x.sliced(2, Affine(token), width), kernel)
        to.small("sum", target if bias is None else sums, products)
        if bias is not None:
            to.elementwise("add", target, sums, bias.unsqueezed(1))


@_lowers("polar.default")
def _polar(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Place]) -> None:
    real, imaginary = _parts(outputs[0])
    for part, name in ((real, "cos"), (imaginary, "sin")):
        to.elementwise(name, part, args[1])
        to.elementwise("mul", part, part, args[0])


def _parts(place: Place) -> tuple[Place, Place]:
    """Return the real and the imaginary part of a complex place."""
    if place.dtype != torch.complex64:
        raise _Unsupported
    strides = tuple(stride.times(2) for stride in place.strides)
    real = replace(place, dtype=torch.float32, offset=place.offset.times(2), strides=strides)
    return real, replace(real, offset=real.offset.plus(_ONE))


def _complex_product(to: Lowering, one: Place, other: Place, out: Place) -> None:
    (a, b), (c, d), (real, imaginary) = map(_parts, (one, other, out))
    for target, (x, y), name, (z, w) in ((real, (a, c), "sub", (b, d)), (imaginary, (a, d), "add", (b, c))):
        left, right = to.temporary(torch.float32, out.sizes), to.temporary(torch.float32, out.sizes)
        to.elementwise("mul", left, x, y)
        to.elementwise("mul", right, z, w)
        to.elementwise(name, target, left, right)


def _kernel_norm(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    spec, x, weight, out, *gate = args
    to.nodes.append(Node("norm", [out], [x, *([] if weight is None else [weight]), *gate], payload=spec))


def _kernel_forward(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("acted") is not None:
        raise NotRecordableError("the activations of experts are observed")
    experts, x, index, weights, out = args
    counts = kwargs.get("neuron_counts")
    payload = experts, kwargs.get("threshold", 0.0), None if counts is None else counts.array
    to.nodes.append(Node("experts", [out], [x, index, weights], payload=payload))


def _kernel_attention(kind: str, *optional: str) -> LowerKernel:
    """Return the lowering of an attention kernel: its kind of node, and the names of its operands that may be absent."""

    def lower(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        query, key, value, out, *pages = args
        present = {name: kwargs[name] is not None for name in optional}
        reads = [query, key, value, *pages, *(kwargs[name] for name in optional if present[name])]
        to.nodes.append(Node(kind, [out], reads, payload={**kwargs, **present}))

    return lower


def _kernel_recurrent(to: Lowering, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    name, (out, *operands), numbers, *past = args
    present: list[Any] = [0.0 if operand is None else operand for operand in operands]
    written = 0 if operands[0] is None else 1
    to.nodes.append(Node("recurrent", [out, *(past[0] if past else ()), *present[:written]], present[written:], name, list(numbers)))


_KERNELS: dict[str, LowerKernel] = {
    "linear": lambda to, args, kwargs: to.nodes.append(Node("linear", [args[2]], [args[1]], payload=[args[0]])),
    "norm": _kernel_norm,
    "route": lambda to, args, kwargs: to.nodes.append(Node("router", list(args[3:]), list(args[1:3]), payload=args[0])),
    "forward": _kernel_forward,
    "attention": _kernel_attention("attention", "mask", "sinks", "key_tail"),
    "paged_attention": _kernel_attention("paged attention", "sinks"),
    "matmul": lambda to, args, kwargs: to.nodes.append(Node("matmul", [args[2]], list(args[:2]))),
    "recurrent": _kernel_recurrent,
}
