"""An injected model: its class, and the plan, operators and shared state that it has as `model.moegraft`."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

import torch
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel, TextStreamer

from moegraft.injection.planning import Plan
from moegraft.operators.base import CACHE, InPlaceOperator, ModelOperator, Operator, call_arguments, with_cache_name
from moegraft.operators.context import InjectionContext
from moegraft.operators.decode.cache import adopt
from moegraft.operators.decode.cache import new_cache as empty_cache
from moegraft.operators.decode.mtp_layers import add_mtp_layers
from moegraft.operators.decode.native.record import cpu_timeline
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.routing import ChosenRows
from moegraft.operators.sparsity import LayerSparsity
from moegraft.operators.structure import calls_all_rows
from moegraft.operators.timeline import Timeline

if TYPE_CHECKING:
    from moegraft.injection.verify import LogitsError


@dataclass(frozen=True, slots=True)
class Injection:
    """The plan, operators and shared state of an injected model, as `model.moegraft`.

    Attributes:
        operators: by the path of the module that the operator replaced or works in; the empty path is for an operator of kind `model`.
        context: the state that the operators share.
        stock_folder: the folder of the stock checkpoint; None for a model from memory, a GGUF file or a quantised checkpoint.
        new_head: weights that the stock checkpoint lacks, of a head for another task.
        verifications: the logits beside the stock model's, as often as `verify` has compared them; a model card has the last ones.
        loaded: the states of the parameters that stay, as they were loaded.
    """

    plan: Plan
    operators: Mapping[str, Operator]
    context: InjectionContext
    stock_folder: Path | None = None
    new_head: Sequence[str] = ()
    verifications: list[LogitsError] = field(default_factory=list)
    loaded: dict[str, ParameterState] = field(default_factory=dict)

    @property
    def replacing(self) -> dict[str, Operator]:
        """The operators that take a module's place and its weights."""
        return {path: operator for path, operator in self.operators.items() if not isinstance(operator, InPlaceOperator)}

    @property
    def model_operator(self) -> ModelOperator | None:
        """The operator of kind `model`, which replaces no module and answers `generate`."""
        operator = self.operators.get("")
        return operator if isinstance(operator, ModelOperator) else None

    @property
    def follows(self) -> bool:
        """Whether this process holds experts for the model of another one."""
        group = self.context.expert_group
        return group is not None and group.rank > 0

    def follow(self) -> None:
        """Compute for the process with the model until that closes it; in a process that has the model itself, nothing happens.

        Raises:
            GroupLostError: that process has ended.
        """
        if self.follows:
            assert self.context.expert_group is not None
            self.context.expert_group.follow()

    @property
    def drafting(self) -> bool:
        """Whether the calling thread draws a draft."""
        return self.context.draft_switch.settings is not None

    def statistics(self) -> dict[str, object]:
        """Return the statistics of a model and its operators.

        `modules` by path, `sparsity` of each target that rules give, `devices` for each GPU that holds experts, `files`, of which memory
        holds some of the experts, `decode_steps`: how many steps were replayed, as native programs or captured graphs, and why others were
        not, and `ranks` that hold experts.
        """
        modules = {path or "(the model)": found for path, operator in self.operators.items() if (found := operator.statistics())}
        context, engines = self.context, self.context.gpu_engines_in_use
        sparsity = context.sparse_layers.statistics() if "sparse_layers" in vars(context) else []
        devices: Mapping[str, object] = {} if engines is None else engines.statistics()
        files = context.framed_layers.statistics() if "framed_layers" in vars(context) else {}
        steps: Mapping[str, object] = {} if context.replay is None else context.replay.statistics()
        ranks = [] if context.expert_group is None else context.expert_group.statistics()
        found = {"modules": modules, "sparsity": sparsity, "devices": dict(devices), "files": dict(files)}
        return {**found, "decode_steps": dict(steps), "ranks": ranks}

    def device_counts(self) -> list[tuple[str, Mapping[str, object]]]:
        """Return the name and the counters of each GPU that experts share; counters only grow."""
        engines = self.context.gpu_engines_in_use
        return [] if engines is None else engines.counts()

    @contextmanager
    def timelines(self) -> Iterator[list[Timeline]]:
        """Record the work of GPUs that experts share or of the CPU, and the rounds of drafts, while the body runs.

        Empty where no operator computes on the CPU or a GPU, and nothing is drafted.
        """
        context, operator = self.context, self.model_operator
        engines = context.gpu_engines_in_use
        with ExitStack() as stack:
            if engines is not None and engines.may_open:
                timelines = stack.enter_context(engines.timelines())
            elif "runtime" in vars(context):
                timelines = [stack.enter_context(cpu_timeline(context.runtime, context.replay))]
            else:
                timelines = []
            timelines_of_rounds = timelines or [Timeline("CPU")]
            recorded = operator is not None and operator.record_rounds(timelines_of_rounds)
            try:
                yield timelines_of_rounds if timelines or recorded else []
            finally:
                if operator is not None:
                    operator.record_rounds([])

    def placement(self) -> list[str]:
        """Return the placement of operators as text, a line for each group of equal ones."""
        groups: dict[str, int] = {}
        for operator in self.operators.values():
            groups[operator.placement()] = groups.get(operator.placement(), 0) + 1
        return [f"{count} x {line}" for line, count in groups.items()]

    def close(self) -> None:
        """End transfers and free the slots on GPUs. The model cannot compute after this."""
        self.forget_steps()
        engines, group = self.context.gpu_engines_in_use, self.context.expert_group
        if engines is not None:
            engines.close()
        if group is not None:
            group.close()

    def forget_steps(self) -> None:
        """Record decode steps again, as after a change of the model that is not noticed (moegraft.operators.decode.replay.FrozenModel)."""
        if self.context.replay is not None:
            self.context.replay.release()


class InjectedModel:
    """The methods that an injected model overrides in its stock class."""

    moegraft: Injection

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *, packed: bool = False, push_to_hub: bool = False, **options: Any
    ) -> None:
        """Save the model: a config with the rules, and its weights.

        `from_pretrained` (with `moegraft.injection` imported) and `optimize_and_load` load the folder. With PEFT adapters in the model,
        the adapters alone are saved, as by transformers.

        Args:
            packed: whether to write what operators hold as it is packed, and the stock weights of the other modules, for a folder of its
                own that loads without packing; by default the folder links to the stock weights where they are.
            push_to_hub: whether to upload the folder, with the weights; `options` are then those of `push_to_hub`.
            options: `is_main_process`, `token` and those that say how weights are divided into files, which has no meaning here.

        Raises:
            UnsupportedModelError: the model has no stock checkpoint, or `options` ask for other weights to be saved.
            CheckpointError: the folder holds other weights, or cannot be written.
        """
        from moegraft.injection.in_transformers import save_injected

        if getattr(self, "_hf_peft_config_loaded", False):
            super().save_pretrained(save_directory, push_to_hub=push_to_hub, **options)  # type: ignore[misc] # of the stock class
            return
        save_injected(cast(PreTrainedModel, self), self.moegraft, Path(save_directory), options, packed=packed)
        if push_to_hub:
            self.push_to_hub(options.pop("repo_id", None) or Path(save_directory).name, packed=packed, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload what `save_pretrained` writes, with the stock weights, and a model card where the repository has none.

        Args:
            options: `packed` as in `save_pretrained`; `private`, `token`, `revision`, `commit_message`, `commit_description` and
                `create_pr`, as in transformers.

        Returns:
            The address of the commit.

        Raises:
            UnsupportedModelError, CheckpointError: as `save_pretrained`.
        """
        from moegraft.injection.in_transformers import push_injected

        if getattr(self, "_hf_peft_config_loaded", False):
            return str(super().push_to_hub(repo_id, **options))  # type: ignore[misc] # of the stock class
        return push_injected(cast(PreTrainedModel, self), self.moegraft, repo_id, options)

    def train(self, mode: bool = True) -> Any:
        """Set training mode, in which operators in place leave their modules to PyTorch; packed weights stay as they are.

        Raises:
            UnsupportedModelError: an operator has no backward pass with its options; no module has changed its mode.
        """
        reason = self.moegraft.plan.untrained if mode and hasattr(self, "moegraft") else None
        if reason is not None:
            raise UnsupportedModelError(f"this injected model cannot be trained: {reason}")
        return super().train(mode)  # type: ignore[misc] # of the stock class, which comes after this one

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of the modules that stay, with a warning that the replaced ones are missing."""
        state: dict[str, Any] = super().state_dict(*args, **kwargs)  # type: ignore[misc] # of the stock class, which comes after this one
        replaced = self.moegraft.replacing if hasattr(self, "moegraft") else {}
        if replaced and kwargs.get("destination") is None:  # a module around this one, such as PEFT's, takes what it saves out of the state
            warnings.warn(
                f"the state_dict of an injected model lacks the packed weights of its {len(replaced)} operators "
                f"({next(iter(replaced))}, ...), so no model can be restored from it; use the stock model's, or the checkpoint",
                stacklevel=2,
            )
        return state

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> Any:
        """Resize the embeddings as transformers does, and the head.

        Raises:
            UnsupportedModelError: the head is packed, and would get another size; nothing has changed.
        """
        model = cast(PreTrainedModel, super())
        embeddings: Any = model.get_input_embeddings()
        size, multiple = new_num_tokens or embeddings.num_embeddings, pad_to_multiple_of or 1
        if not isinstance(model.get_output_embeddings(), Operator):
            return model.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if -(-size // multiple) * multiple != embeddings.num_embeddings:
            raise UnsupportedModelError(
                f"the embeddings cannot be resized to {size} tokens: rules have packed the head; resize and save the stock model first, "
                "or leave its head out of the rules"
            )
        return embeddings

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # `copy.deepcopy` and pickle would have to duplicate packed weights and threads.
        raise UnsupportedModelError("an injected model cannot be copied or pickled; load it again with optimize_and_load")


def injected_class(base: type[PreTrainedModel], *, captures: bool, mtp: bool = False) -> type[PreTrainedModel]:
    """Create a subclass of `base`, under its name, whose constructor puts `operators` in the place of modules.

    Args:
        captures: whether the forward pass may be another one than the stock one: decode steps are captured, or run elsewhere.
        mtp: whether the model gets layers for multi-token prediction.
    """

    def __init__(
        self: PreTrainedModel, config: PretrainedConfig, *args: Any, operators: Mapping[str, Operator] | None = None, **kwargs: Any
    ) -> None:
        # An argument and not a member of the class: the class would keep operators alive after their model.
        base.__init__(self, config, *args, **kwargs)
        if mtp:
            add_mtp_layers(self)
        for path, operator in (operators or {}).items():
            place(self, path, operator)

    @functools.wraps(base.get_expanded_tied_weights_keys)
    def get_expanded_tied_weights_keys(self: PreTrainedModel, *args: Any, **kwargs: Any) -> dict[str, str]:
        # `tie_weights` calls this again after `place`: only layers that the model still has are tied.
        ties = base.get_expanded_tied_weights_keys(self, *args, **kwargs)
        return _ties_outside(ties, (path for path, module in self.named_modules() if isinstance(module, Operator)))

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = with_cache_name(kwargs)
        stock = functools.partial(base.generate, self)  # type: ignore[attr-defined] # only generating classes have it
        operator, context = self.moegraft.model_operator, self.moegraft.context
        group, streamer = context.expert_group, call_arguments(stock, args, kwargs).get("streamer")
        if group is not None and group.rank:
            outputs = group.await_result()
            stream(outputs if isinstance(outputs, torch.Tensor) else outputs.sequences, call_arguments(stock, args, kwargs))
            return outputs
        with nullcontext() if group is None else group.result() as give, _DEFERRED_LOG.while_printing(streamer):
            if operator is not None:
                outputs = operator.generate(self, stock, *args, **kwargs)
            elif context.replay is not None:
                outputs = context.replay.generate(self, stock, args, kwargs)
            else:
                outputs = stock(*args, **kwargs)
            if give is not None:
                give(outputs)
        return outputs

    def _prepare_cache_for_generation(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        given = model_kwargs.get(CACHE)
        result = base._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[attr-defined]
        made = model_kwargs.get(CACHE)
        if given is None and type(made) is DynamicCache:
            adopt(made)
        return result

    first_argument = next(iter(list(inspect.signature(base.forward).parameters)[1:]), None)

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        injection = None if torch.compiler.is_compiling() else injection_of(self)  # a class can build stock models as well
        if injection is not None and injection.follows:
            raise UnsupportedModelError(
                "this process holds experts for the model of rank 0: call generate in all processes, or call moegraft.follow() of this "
                "model here and forward on rank 0"
            )
        steps = None if injection is None else injection.context.replay
        if steps is None:
            return base.forward(self, *args, **kwargs)
        kwargs = with_cache_name(kwargs)
        if len(args) == 1 and first_argument == "input_ids":
            return steps.forward(self, functools.partial(base.forward, self), (), {first_argument: args[0], **kwargs})
        return steps.forward(self, functools.partial(base.forward, self), args, kwargs)

    members: dict[str, Callable[..., Any]] = {"__init__": __init__, "get_expanded_tied_weights_keys": get_expanded_tied_weights_keys}
    if issubclass(base, GenerationMixin):
        members["generate"] = functools.wraps(base.generate)(generate)
        members["_prepare_cache_for_generation"] = _prepare_cache_for_generation
    if captures:
        members["forward"] = forward
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    # Both names are kept: transformers looks classes up by name and source file, and users read them.
    return type(base.__name__, (InjectedModel, base), {**members, **names})


def stream(sequences: torch.Tensor, arguments: Mapping[str, Any]) -> None:
    """Give the streamer of a finished call of `generate` the sequences (B, T) as that call would have: the prompt, each token, the end."""
    streamer = arguments.get("streamer")
    if streamer is None:
        return
    given = arguments.get("inputs", arguments.get("input_ids"))
    if given is None:  # embeddings, which have no ids, or the token that begins a text
        given = sequences[:, : 1 if arguments.get("inputs_embeds") is None else 0]
    streamer.put(given.cpu())
    for tokens in sequences[:, given.shape[1] :].unbind(1):
        streamer.put(tokens)
    streamer.end()


class _DeferredLog(logging.Handler):
    """Holds back what moegraft logs while a streamer prints a text: a record in the middle of it would be read as a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self._guard = threading.Lock()
        self._texts = 0
        self._records: list[logging.LogRecord] = []
        self._replaced: tuple[list[logging.Handler], bool] = [], True

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)

    @contextmanager
    def while_printing(self, streamer: object) -> Iterator[None]:
        """Hold records while the body runs, if the streamer prints; other streamers may be read elsewhere, by a server for instance."""
        if getattr(type(streamer), "on_finalized_text", None) is not TextStreamer.on_finalized_text:
            yield
            return
        logger = logging.getLogger("moegraft")
        with self._guard:
            if not self._texts:
                self._replaced = logger.handlers, logger.propagate
                logger.handlers, logger.propagate = [self], False
            self._texts += 1
        try:
            yield
        finally:
            records: list[logging.LogRecord] = []
            with self._guard:
                self._texts -= 1
                if not self._texts:
                    added = [each for each in logger.handlers if each is not self]
                    logger.handlers, logger.propagate = [*self._replaced[0], *added], self._replaced[1]
                    records, self._records = self._records, []
            for record in records:
                logger.callHandlers(record)


_DEFERRED_LOG = _DeferredLog()  # of this process, as the loggers are


def place(model: PreTrainedModel, path: str, operator: Operator) -> None:
    """Replace the module at `path` by an operator."""
    parent, _, leaf = path.rpartition(".")
    block = model.get_submodule(parent)
    stock = getattr(block, leaf)
    setattr(block, leaf, operator)
    if operator.kind == "experts" and calls_all_rows(stock):
        ChosenRows(block, operator, stock.num_experts)
    # Some families initialise the experts' parameters from the block above them, and an operator has none. Stored parameters need no
    # initialisation, as a checkpoint that lacks one is refused; buffers that are not stored do.
    if not block._non_persistent_buffers_set:
        block._is_hf_initialized = True  # type: ignore[assignment] # transformers' own mark
    # transformers records ties when it builds a model; a tie of a replaced layer would restore its parameter, or miss it.
    model.all_tied_weights_keys = _ties_outside(model.all_tied_weights_keys, [path])


def _ties_outside(ties: Mapping[str, str], paths: Iterable[str]) -> dict[str, str]:
    replaced = tuple(f"{path}." for path in paths)
    return {name: tie for name, tie in ties.items() if not name.startswith(replaced)}


def injection_of(model: PreTrainedModel) -> Injection | None:
    """Return `model.moegraft`; None for a stock model."""
    injection = getattr(model, "moegraft", None)
    return injection if isinstance(injection, Injection) else None


class ParameterState(NamedTuple):
    """PyTorch's count of writes to a parameter, and some values, as writes through `.data`, PEFT's merges among them, are not counted."""

    writes: int
    values: torch.Tensor

    def differs(self, earlier: ParameterState) -> bool:
        """Return whether the parameter was written to since; another dtype, and rounding to bfloat16, are no writes."""
        same_dtype = self.values.dtype == earlier.values.dtype
        return self.writes > earlier.writes or (same_dtype and not torch.equal(self.values.bfloat16(), earlier.values.bfloat16()))


def parameter_states(model: PreTrainedModel) -> dict[str, ParameterState]:
    """Return the state of each parameter that is in memory, with values of one page, since files of weights may be mapped."""
    found = {}
    for name, each in model.named_parameters():
        if each.numel() and not each.is_meta:
            values = each.detach()[(0,) * (each.dim() - 1)].reshape(-1)[:64]
            found[name] = ParameterState(0 if each.is_inference() else each._version, values.cpu().clone())
    return found


def sparse_layers(model: PreTrainedModel) -> dict[str, LayerSparsity]:
    """Return the layers of an injected model that can leave neurons out, by path."""
    injection = injection_of(model)
    operators = {} if injection is None else injection.operators
    return {path: operator.sparsity for path, operator in operators.items() if operator.sparsity is not None}


def new_cache(model: PreTrainedModel) -> Any:
    """Return an empty key-value cache of the kind that the model's `generate` creates, for several calls of one conversation.

    Decode steps are replayed over it, which they are not over a cache that the caller has made.

    Raises:
        UnsupportedModelError: only the model itself can make its cache, in a forward pass.
    """
    injection = injection_of(model)
    operator = None if injection is None else injection.model_operator
    created = None if operator is None else operator.new_cache(model)
    return empty_cache(model) if created is None else created
