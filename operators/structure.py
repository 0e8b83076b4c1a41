"""The kind of a module, which a rule's `kind:` matches, recognised by its structure alone."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from moegraft.operators.base import CACHE, Kind

ROUTER_NAMES = ("gate", "router")
MTP = "mtp"  # the submodule with a model's layers for multi-token prediction
LIBRARIES = ("torch", "transformers", "moegraft", "builtins", "functools")
# Once other outputs were asked for, transformers leaves hooks on the model, which do nothing while none are. Experts on a GPU listen to
# their routers, also while a step is captured, and those of chosen rows compute what is recorded.
_HARMLESS_HOOKS = ("transformers.utils.output_capturing", "moegraft.operators.offload.gpu_layer", "moegraft.operators.routing")
SHARED_NAMES = ("shared_experts", "shared_expert", "shared_mlp")  # names of the experts that every token passes


def is_experts(path: str, module: nn.Module) -> bool:
    """Return whether a module is named `experts` and holds all routed experts of a layer, as in transformers 5."""
    parameters = dict(module.named_parameters(recurse=False))
    return path.rpartition(".")[2] == "experts" and hasattr(module, "num_experts") and any(p.dim() == 3 for p in parameters.values())


def calls_all_rows(experts: nn.Module) -> bool:
    """Return whether a block calls its experts with a row of each token for each expert, and without the routing (Llama 4)."""
    return len(inspect.signature(type(experts).forward).parameters) == 2  # with self


def is_router(path: str, module: nn.Module, model: nn.Module) -> bool:
    """Return whether a module is the sibling of an experts module that scores the experts: its weight has one row per expert."""
    parent, _, leaf = path.rpartition(".")
    if leaf not in ROUTER_NAMES:
        return False
    experts = getattr(model.get_submodule(parent), "experts", None)
    num_experts = getattr(experts, "num_experts", None)
    return num_experts is not None and any(p.dim() == 2 and p.shape[0] == num_experts for p in module.parameters())


def layers_before_mtp(model: nn.Module) -> int:
    """Return the number of a model's first MTP layer: they follow the body's, as in checkpoints; 0 if it has none."""
    config: Any = getattr(model, "config", None)
    if MTP not in model._modules or not hasattr(config, "get_text_config"):
        return 0
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def hooked(tables: Iterable[Mapping[int, Any]]) -> bool:
    """Return whether any of modules' tables of hooks has one that may change what a pass computes, or sees it."""
    modules = (getattr(hook, "__module__", "") for table in tables if table for hook in table.values())
    return any(module not in _HARMLESS_HOOKS for module in modules) or bool(nn.modules.module._has_any_global_hook())


def is_library(thing: Any) -> bool:
    """Return whether a class or function is PyTorch's, transformers', Python's or moegraft's, and not the user's."""
    return (getattr(thing, "__module__", None) or "").partition(".")[0] in LIBRARIES


@lru_cache(maxsize=512)
def source_of(owner: type[nn.Module]) -> str:
    """Return the source text of a class; empty where it has none."""
    module = inspect.getmodule(owner)
    return "" if module is None else _class_sources(module).get(owner.__qualname__, "")


@lru_cache(maxsize=8)
def _class_sources(module: ModuleType) -> dict[str, str]:
    """Return the source texts of all classes by qualified name; `inspect.getsource` parses the whole module for each of them."""
    try:
        lines, _ = inspect.findsource(module)
        tree = ast.parse("".join(lines))
    except (OSError, TypeError, SyntaxError):  # defined in an interactive session, or in C
        return {}
    sources: dict[str, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.ClassDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                sources.setdefault(prefix + child.name, "".join(lines[first - 1 : child.end_lineno]))
                inner = f"{prefix}{child.name}."
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{prefix}{child.name}.<locals>."
            if isinstance(child, ast.stmt):
                visit(child, inner)

    visit(tree, "")
    return sources


@lru_cache(maxsize=512)
def weights_read(owner: Any) -> frozenset[str]:
    """Return the names of the modules whose `weight` the code of a module's class reads itself, other than in training."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        match node:
            case ast.If(test=ast.BoolOp(op=ast.And(), values=[first, *_]) | first) if ast.unparse(first) == "self.training":
                for statement in node.orelse:
                    visit(statement)
                return
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr=name), attr="weight"):
                names.add(name)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(textwrap.dedent(source_of(owner))))
    return frozenset(names)


def is_linear(path: str, module: nn.Module, model: nn.Module) -> bool:
    """Return whether a module is a linear layer that its owner only calls; absorbed attention reads `self.kv_b_proj.weight` instead.

    Layers of Mamba-2 read the weight of `out_proj` in training alone.
    """
    if type(module) is not nn.Linear:
        return False
    parent, _, leaf = path.rpartition(".")
    owner: Any = type(model.get_submodule(parent))  # mypy confuses the __hash__ of a module with that of its class
    return leaf not in weights_read(owner)


def is_attention(module: nn.Module) -> bool:
    """Return whether a module calls the attention function that its config names, through transformers' attention interface."""
    owner: Any = type(module)
    return hasattr(module, "config") and "ALL_ATTENTION_FUNCTIONS.get_interface(" in source_of(owner)


def counts_cached_tokens(module: nn.Module) -> bool:
    """Return whether a layer asks its cache for the number of tokens, which is one for all rows of a batch (attention of Llama 4)."""
    owners: tuple[Any, ...] = type(module).__mro__  # an operator may have given it a class of its own
    return any(f"{CACHE}.get_seq_length(self.layer_idx)" in source_of(owner) for owner in owners if is_library(owner))


def sees_whole_images(config: PreTrainedConfig) -> bool:
    """Return whether tokens of an image attend to later ones of it, by a mask of the model's own (Gemma 4)."""
    return bool(getattr(config.get_text_config(), "use_bidirectional_attention", None))


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a root-mean-square norm: one vector of weights, no children, a reciprocal root in its class's source."""
    parameters = module._parameters
    if set(parameters) != {"weight"} or parameters["weight"] is None or parameters["weight"].dim() != 1 or module._modules:
        return False
    owner: Any = type(module)
    return isinstance(module, nn.RMSNorm) or "rsqrt(" in source_of(owner) or "pow(mean_squared, -0.5)" in source_of(owner)


def rotary_limit(model: PreTrainedModel) -> int | None:
    """Return the most tokens of a text which leaves the rotary embeddings of others in its pass as they are; None: any number.

    Embeddings of the kind `longrope` are others for all positions once one is beyond the limit; `dynamic` ones depend on the longest text,
    but for those with an `alpha`, as of Hunyuan, which transformers computes once.
    """
    config = model.config.get_text_config(decoder=True)
    given = getattr(config, "rope_parameters", None) or {}
    limits = []
    for each in (given, *given.values()):
        kind = each.get("rope_type") if isinstance(each, Mapping) else None
        if kind == "longrope" or (kind == "dynamic" and not each.get("alpha")):
            limits.append(int(each.get("original_max_position_embeddings") or 0) if kind == "longrope" else 0)
    return min(limits, default=None)


# The functions in which families compute the rules of recurrent layers, by the names of their first arguments. They have other names in
# each family, and are looked up when a layer calls them.
RECURRENT_RULES: Mapping[str, tuple[str, ...]] = {
    "delta_rule": ("query", "key", "value", "g", "beta"),
    "conv_update": ("hidden_states", "conv_state", "weight", "bias", "activation"),
    "conv": ("hidden_states", "weight", "bias", "activation"),
    "state_update": ("state", "hidden_states", "dt", "A", "B", "C", "D"),
    "chunk_scan": ("hidden_states", "dt", "A", "B", "C", "chunk_size"),
    "scan": ("hidden_states", "dt", "A", "B", "C", "D", "z"),
}


@lru_cache(maxsize=512)
def recurrent_functions(owner: type[nn.Module]) -> Mapping[str, str]:
    """Return which functions of its file the forward pass of a class calls, each with its name in RECURRENT_RULES."""
    forward = inspect.unwrap(owner.forward)
    code, scope = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    functions: dict[str, str] = {}
    for name in () if code is None else code.co_names:
        if inspect.isfunction(scope.get(name)):
            arguments = tuple(inspect.signature(scope[name]).parameters)
            functions.update((name, rule) for rule, first in RECURRENT_RULES.items() if arguments[: len(first)] == first)
    return functions


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module is a layer with a state of fixed size whose rule is computed by functions of known form."""
    owner: Any = type(module)
    return hasattr(module, "layer_idx") and bool(recurrent_functions(owner))


def kinds(path: str, module: nn.Module, model: nn.Module) -> frozenset[Kind]:
    """Return every kind of `module`, which is at `path` (empty for the model itself)."""
    if not path:
        return frozenset({"model"})
    found: dict[Kind, bool] = {
        "experts": is_experts(path, module),
        "router": is_router(path, module, model),
        "linear": is_linear(path, module, model),
        "attention": is_attention(module),
        "norm": is_norm(module),
        "recurrent": is_recurrent(module),
    }
    return frozenset(kind for kind, holds in found.items() if holds)
