"""Reading a checkpoint: its files, which key feeds which parameter, and one expert's piece at a time."""

from moegraft.injection.checkpoint.files import Checkpoint, LazyTensor, open_checkpoint, weight_files
from moegraft.injection.checkpoint.keymap import KeyMap, map_keys
from moegraft.injection.checkpoint.sources import CheckpointExperts, CheckpointLinear, CheckpointWeights, StoredWeights

__all__ = [
    "Checkpoint",
    "CheckpointExperts",
    "CheckpointLinear",
    "CheckpointWeights",
    "KeyMap",
    "LazyTensor",
    "StoredWeights",
    "map_keys",
    "open_checkpoint",
    "weight_files",
]
