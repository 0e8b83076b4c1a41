"""One layer's experts as the sparse paths read them: every neuron a row of gate, one of up and one of down."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moegraft.cpu_backend import GateSpec
from moegraft.operators.kernels.launch import Bytes
from moegraft.operators.kernels.packed_layout import BLOCK_ROWS, GROUP_COLUMNS, Gate, PackedMatrix, gate_of, packed_matrix, round_up


@dataclass(frozen=True, slots=True)
class Sketch:
    """A 4-bit copy of the gate that predicts which neurons are active: in the CPU kernel's int4 blocks."""

    packed: Bytes
    matrix: PackedMatrix


@dataclass(frozen=True, slots=True)
class SparseWeights:
    """The weights of one layer, on one device; one copy serves the sparse paths and the dense ones.

    Attributes:
        gate_up: (E, 2I, H), gate rows before up rows or `interleaved` with them; ungated (E, I, H).
        down_t: (E, I, H), down transposed, of the same dtype.
        gate_up_bias: (E, rows of gate_up) float32; None: the experts have no biases.
        down_bias: (E, H) float32.
    """

    gate_up: torch.Tensor
    down_t: torch.Tensor
    gate_spec: GateSpec
    gated: bool = True
    interleaved: bool = False
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    sketch: Sketch | None = None

    def __post_init__(self) -> None:
        num_experts, neurons, hidden = self.down_t.shape
        expected = (num_experts, neurons * (2 if self.gated else 1), hidden)
        assert tuple(self.gate_up.shape) == expected, f"gate_up is {tuple(self.gate_up.shape)}, not {expected}"
        assert self.gate_up.is_contiguous() and self.down_t.is_contiguous(), "rows are read whole"
        assert (self.gate_up_bias is None) == (self.down_bias is None), "all parts have biases, or none has"

    @property
    def num_experts(self) -> int:
        return self.down_t.shape[0]

    @property
    def neurons(self) -> int:
        return self.down_t.shape[1]

    @property
    def hidden(self) -> int:
        return self.down_t.shape[2]

    @property
    def gate(self) -> Gate:
        return gate_of(self.gate_spec, gated=self.gated)

    def gate_rows(self) -> torch.Tensor:
        """(E, I, H), a view: what the criterion is computed from."""
        if not self.gated:
            return self.gate_up
        return self.gate_up[:, 0::2] if self.interleaved else self.gate_up[:, : self.neurons]

    def up_rows(self) -> torch.Tensor:
        """(E, I, H), a view of gated experts' up."""
        return self.gate_up[:, 1::2] if self.interleaved else self.gate_up[:, self.neurons :]

    def permute(self, order: torch.Tensor) -> None:
        """Puts each expert's neurons in the order (E, I) int64, in place: the sum over neurons stays what it is.

        Neurons that are active together then lie together, so that groups of them are either needed or not. A sketch is not moved.
        """
        assert self.sketch is None, "sketch after permuting"
        for expert, places in enumerate(order.to(self.down_t.device)):
            self.down_t[expert] = self.down_t[expert, places]
            for tensor in (self.gate_up, self.gate_up_bias):
                if tensor is not None:
                    tensor[expert] = tensor[expert, self._row_order(places)]

    def _row_order(self, places: torch.Tensor) -> torch.Tensor:
        """The rows of `gate_up` in the order of neurons `places`."""
        if not self.gated:
            return places
        return torch.stack([2 * places, 2 * places + 1], 1).flatten() if self.interleaved else torch.cat([places, places + self.neurons])


def sketch_of(weights: SparseWeights) -> Sketch:
    """The sketch of a layer's gate: 4.5 bits a weight, 9% of what a bfloat16 expert takes."""
    packed = torch.stack([pack_int4(rows) for rows in weights.gate_rows()])
    rows = round_up(weights.neurons, BLOCK_ROWS)
    matrix = packed_matrix("int4", rows, weights.hidden, outputs=weights.neurons, expert_bytes=packed.shape[1])
    found = Bytes.of(packed, "int4")
    if weights.gate_up_bias is None:
        return Sketch(found, matrix)
    # the biases are those of the exact gate, which have rows of their own
    stride = 2 if weights.interleaved else 1
    matrix = matrix._replace(expert_words=weights.gate_up.shape[1], bias_word=0, bias_stride=stride)
    return Sketch(Bytes(found.units, found.scales, weights.gate_up_bias), matrix)


def pack_int4(rows: torch.Tensor) -> torch.Tensor:
    """A matrix (R, C) in the CPU kernel's int4 blocks, on the matrix's own device: uint8, the very bytes that `PackedLinear` holds.

    Groups of 32 columns share a float16 scale: the value of largest magnitude over -8 (GGUF's Q4_0).
    """
    height, width = (round_up(size, 32) for size in rows.shape)
    padded = F.pad(rows.float(), (0, width - rows.shape[1], 0, height - rows.shape[0]))
    values = padded.view(height // BLOCK_ROWS, BLOCK_ROWS, width // GROUP_COLUMNS, GROUP_COLUMNS)
    extreme = values.gather(-1, values.abs().argmax(-1, keepdim=True))
    scale = extreme / -8.0
    inverse = torch.where(scale != 0.0, 1.0 / scale, 0.0)
    codes = (values * inverse + 8.5).clamp(0.0, 15.5).to(torch.uint8)
    # (block, row, group, column / 8, high nibble, column % 4) -> (block, group, column / 8, row, column % 4)
    nibbles = codes.view(*codes.shape[:3], 4, 2, 4).permute(0, 2, 3, 1, 4, 5)
    packed = (nibbles[..., 0, :] | nibbles[..., 1, :] << 4).flatten(2)
    scales = scale.squeeze(-1).transpose(1, 2).to(torch.float16).contiguous().view(torch.uint8)
    return torch.cat([scales, packed], dim=-1).flatten()
