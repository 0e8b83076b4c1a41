"""An injected model: its class, and the plan, operators and shared state that it has as `model.moegraft`."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel, TextStreamer

from moegraft.injection.planning import Plan
from moegraft.operators.base import InPlaceOperator, ModelOperator, Operator, call_arguments
from moegraft.operators.context import InjectionContext
from moegraft.operators.errors import UnsupportedModelError
from moegraft.operators.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Injection:
    """The plan, operators and shared state of an injected model, as `model.moegraft`.

    Attributes:
        operators: by the path of the module that the operator replaced or works in; the empty path is for an operator of kind `model`.
        context: the state that the operators share.
    """

    plan: Plan
    operators: Mapping[str, Operator]
    context: InjectionContext

    @property
    def replacing(self) -> dict[str, Operator]:
        """The operators that take a module's place and its weights."""
        return {path: operator for path, operator in self.operators.items() if not isinstance(operator, InPlaceOperator)}

    @property
    def model_operator(self) -> ModelOperator | None:
        """The operator of kind `model`, which replaces no module and answers `generate`."""
        found = self.operators.get("")
        return found if isinstance(found, ModelOperator) else None

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
        group = self.context.expert_group
        if group is not None and group.rank > 0:
            group.follow()

    @property
    def drafting(self) -> bool:
        """Whether the calling thread draws a draft."""
        return self.context.draft_switch.settings is not None

    def statistics(self) -> dict[str, object]:
        """Return the operators' statistics: `modules` by path, `sparsity` by target, and `devices`, each GPU that experts share."""
        modules = {path or "(the model)": found for path, operator in self.operators.items() if (found := operator.statistics())}
        return {"modules": modules, **self.context.statistics()}

    def device_counts(self) -> list[tuple[str, Mapping[str, object]]]:
        """Return the name and the counters of each GPU that experts share; counters only grow."""
        return self.context.device_counts()

    @contextmanager
    def timelines(self) -> Iterator[list[Timeline]]:
        """Record the work of GPUs that experts share or of the CPU, and the rounds of drafts, while the body runs.

        Empty where no operator computes on the CPU or a GPU, and nothing is drafted.
        """
        operator = self.model_operator
        with self.context.timelines() as devices:
            timelines = devices or [Timeline("CPU")]
            recorded = operator is not None and operator.record_rounds(timelines)
            try:
                yield timelines if devices or recorded else []
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
        self.context.close()


class InjectedModel:
    """The methods that an injected model overrides in its stock class."""

    moegraft: Injection

    def save_pretrained(self, *args: object, **kwargs: object) -> NoReturn:
        """
        Raises:
            UnsupportedModelError: always; the experts are packed for a kernel, and a checkpoint without them could not be loaded.
        """
        raise UnsupportedModelError(
            f"an injected model cannot be saved: {len(self.moegraft.replacing)} of its modules hold weights packed for their operator, "
            "not parameters; save the stock model (AutoModelForCausalLM.from_pretrained) or copy the checkpoint it was loaded from"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of the modules that stay, with a warning that the replaced ones are missing."""
        found: dict[str, Any] = super().state_dict(*args, **kwargs)  # type: ignore[misc] # of the stock class, which comes after this one
        replaced = self.moegraft.replacing if hasattr(self, "moegraft") else {}
        if replaced:
            warnings.warn(
                f"the state_dict of an injected model lacks the packed weights of its {len(replaced)} operators "
                f"({next(iter(replaced))}, ...), so no model can be restored from it; use the stock model's, or the checkpoint",
                stacklevel=2,
            )
        return found

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """
        Raises:
            UnsupportedModelError: always; `copy.deepcopy` and pickle would have to duplicate packed weights and threads.
        """
        raise UnsupportedModelError("an injected model cannot be copied or pickled; load it again with optimize_and_load")


def injected_class(base: type[PreTrainedModel], *, captures: bool) -> type[PreTrainedModel]:
    """Create a subclass of `base`, under its name, whose constructor puts `operators` in the place of modules.

    Args:
        captures: whether the forward pass may be another one than the stock one: decode steps are captured, or run elsewhere.
    """

    def __init__(
        self: PreTrainedModel, config: PretrainedConfig, *args: Any, operators: Mapping[str, Operator] | None = None, **kwargs: Any
    ) -> None:
        # An argument and not a member of the class: the class would keep operators alive after their model.
        base.__init__(self, config, *args, **kwargs)
        for path, operator in (operators or {}).items():
            place(self, path, operator)

    @functools.wraps(base.get_expanded_tied_weights_keys)
    def get_expanded_tied_weights_keys(self: PreTrainedModel, *args: Any, **kwargs: Any) -> dict[str, str]:
        # `tie_weights` calls this again after `place`: only layers that the model still has are tied.
        ties = base.get_expanded_tied_weights_keys(self, *args, **kwargs)
        return _ties_outside(ties, (path for path, module in self.named_modules() if isinstance(module, Operator)))

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = self.moegraft.context.expert_group
        if group is None:
            return own_generate(self, *args, **kwargs)
        if group.rank:
            outputs = group.await_result()
            arguments = call_arguments(functools.partial(base.generate, self), args, kwargs)  # type: ignore[attr-defined] # as below
            stream(outputs if isinstance(outputs, torch.Tensor) else outputs.sequences, arguments)
            return outputs
        with group.result() as give:
            outputs = own_generate(self, *args, **kwargs)
            give(outputs)
        return outputs

    def own_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        stock = functools.partial(base.generate, self)  # type: ignore[attr-defined] # only generating classes have it
        operator = self.moegraft.model_operator
        with _HELD_LOG.while_printing(call_arguments(stock, args, kwargs).get("streamer")):
            if operator is not None:
                return operator.generate(self, stock, *args, **kwargs)
            return self.moegraft.context.generate(self, stock, args, kwargs)

    first_argument = next(iter(list(inspect.signature(base.forward).parameters)[1:]), None)

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        injection = None if torch.compiler.is_compiling() else injection_of(self)  # a class can build stock models as well
        steps = None if injection is None else injection.context.decode_steps
        if injection is not None and injection.follows:
            raise UnsupportedModelError(
                "this process holds experts for the model of rank 0: call generate in all processes, or call moegraft.follow() of this "
                "model here and forward on rank 0"
            )
        if injection is None or steps is None:
            return base.forward(self, *args, **kwargs)
        if len(args) == 1 and first_argument == "input_ids":
            (ids,) = args
            return steps.forward(
                self, functools.partial(base.forward, self), (), {first_argument: ids, **kwargs}, drafting=injection.drafting
            )
        return steps.forward(self, functools.partial(base.forward, self), args, kwargs, drafting=injection.drafting)

    members: dict[str, Callable[..., Any]] = {"__init__": __init__, "get_expanded_tied_weights_keys": get_expanded_tied_weights_keys}
    if issubclass(base, GenerationMixin):
        members["generate"] = functools.wraps(base.generate)(generate)
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


class _HeldLog(logging.Handler):
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


_HELD_LOG = _HeldLog()  # of this process, as the loggers are


def place(model: PreTrainedModel, path: str, operator: Operator) -> None:
    """Replace the module at `path` by an operator."""
    parent, _, leaf = path.rpartition(".")
    block = model.get_submodule(parent)
    setattr(block, leaf, operator)
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
    found = getattr(model, "moegraft", None)
    return found if isinstance(found, Injection) else None


def captured_steps_of(model: PreTrainedModel) -> Any:
    """Return the object that captures a model's decode steps on GPUs; None for stock models, and where no rule enables capture."""
    injection = injection_of(model)
    return None if injection is None else injection.context.captured_steps


def new_cache(model: PreTrainedModel) -> Any:
    """Return an empty key-value cache of the kind that the model's `generate` creates."""
    injection = injection_of(model)
    operator = None if injection is None else injection.model_operator
    created = None if operator is None else operator.new_cache(model)
    return DynamicCache(config=model.config.get_text_config(decoder=True)) if created is None else created
