"""From a command's options to rules and the outline of the model that they are for. Imports torch: commands import this when they run."""

from __future__ import annotations

from dataclasses import dataclass

from moegraft.injection.cli.commands.options import StatedMachine
from moegraft.injection.cli.loading import model_of, quiet_libraries
from moegraft.injection.cli.model_options import ModelOptions
from moegraft.injection.cli.option_groups import OptionsError
from moegraft.injection.outline import Outline, outline
from moegraft.injection.predict.forecast import Machinery
from moegraft.injection.predict.gpu import budget_of
from moegraft.injection.predict.measure import Measurements
from moegraft.injection.rulefile import RuleFile, default_rules, read_rules
from moegraft.operators.machine import probe_machine
from moegraft.operators.registry import OperatorRegistry, load_registry


@dataclass(frozen=True, slots=True)
class OutlinedRules:
    """Rules and the model that they are for."""

    outline: Outline
    rules: RuleFile
    registry: OperatorRegistry


def outlined(options: ModelOptions) -> Outline:
    """
    Raises:
        CheckpointError, UnsupportedModelError: no such model, or none that can be built.
    """
    quiet_libraries()
    return outline(model_of(options), trust_remote_code=options.trust_remote_code, gguf=options.gguf)


def outlined_rules(options: ModelOptions) -> OutlinedRules:
    """
    Raises:
        RuleErrors: mistakes that show without a model.
        CheckpointError, UnsupportedModelError: no such model, or none that can be built.
    """
    registry = load_registry()
    # Rules first: what is wrong with them shows at once, where a model takes seconds.
    rules = read_rules(options.rules, vars=options.vars(), registry=registry) if options.rules else None
    found = outlined(options)
    if rules is None:
        rules = read_rules(default_rules(found.model_type), vars=options.vars(), registry=registry)
    return OutlinedRules(found, rules, registry)


def machinery_of(measured: Measurements | None, stated: StatedMachine) -> Machinery:
    """This machine, with what the options state of another.

    Raises:
        OptionsError: a bandwidth is stated and there is no GPU that it would be of.
    """
    machine = probe_machine()
    of_gpu = measured.gpu if measured is not None else None
    budget = budget_of(machine, stated.gpus, of_gpu, gbps=stated.gpu_bandwidth, link_gbps=stated.link_bandwidth)
    if budget is None and not (stated.gpu_bandwidth is None and stated.link_bandwidth is None):
        raise OptionsError(
            "--gpu-bandwidth and --link-bandwidth are of a GPU, and none is here: state its memory, too, as --gpu-memory 24GiB"
        )
    return Machinery(machine.available_bytes if stated.ram is None else stated.ram, measured, budget)
