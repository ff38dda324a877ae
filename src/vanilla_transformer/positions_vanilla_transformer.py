"""Positional encodings, section 3.5.

Shapes: B batch · Q positions of a query · D `d_model`.
"""

import torch
from torch import Tensor, nn

from .configuration_vanilla_transformer import VanillaTransformerConfig


class SinusoidalPositions(nn.Module):
    """Sines and cosines with wavelengths from 2 pi to 2 pi times the base.

    Nothing is stored, so nothing can be lost in loading, and sequences may have any length.
    """

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__()
        self.offset = config.position_offset
        self.is_interleaved = config.position_embedding_type == "sinusoidal"
        # Derived in float64, whatever the dtype of the weights.
        self.frequencies = [
            config.position_base ** (-column / config.d_model)
            for column in range(0, config.d_model, 2)
        ]

    def forward(
        self, position_ids: Tensor, dtype: torch.dtype, most: int | Tensor | None = None
    ) -> Tensor:
        """Encodes positions, with angles in float32, or in float64 for a float64 model.

        Args:
            position_ids: Counted from 0, `[B, Q]` or `[1, Q]`.
            dtype: Of the result.
            most: For tables, which end.

        Returns:
            `[B, Q, D]` or `[1, Q, D]`: sines in the even columns and cosines in the odd ones, or,
            not interleaved, sines in the first half.
        """
        angle_dtype = torch.promote_types(dtype, torch.float32)
        frequencies = torch.tensor(self.frequencies, dtype=angle_dtype)
        # A blocking copy would wait for all that the device has to do.
        frequencies = frequencies.to(position_ids.device, non_blocking=True)
        angles = (position_ids + self.offset)[..., None].to(angle_dtype) * frequencies
        pair_axis = -1 if self.is_interleaved else -2
        return torch.stack((angles.sin(), angles.cos()), dim=pair_axis).flatten(-2).to(dtype)


class LearnedPositions(nn.Embedding):
    """A learned row for each position (section 3.5, table 3 row E)."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config.max_position_embeddings + config.position_offset, config.d_model)
        self.offset = config.position_offset

    def forward(  # type: ignore[override]
        self, position_ids: Tensor, dtype: torch.dtype, most: int | Tensor | None = None
    ) -> Tensor:
        """Looks positions up, `[B, Q]` or `[1, Q]` -> the same with a last axis D.

        Args:
            position_ids: Counted from 0.
            dtype: Of the result.
            most: Number that no sequence is longer than; if it is not known, or beyond the end of
                the table, the positions are read, which waits for a GPU.

        Raises:
            ValueError: If a position is beyond the end of the table.
        """
        # Compiled code checks indices itself; on the meta device there are none.
        if not (torch.compiler.is_compiling() or position_ids.is_meta):
            fits = isinstance(most, int) and most <= self.num_embeddings - self.offset
            if not fits:
                self._refuse_end(int(position_ids.max()) + 1)
        return super().forward(position_ids + self.offset).to(dtype)

    def _refuse_end(self, length: int) -> None:
        longest = self.num_embeddings - self.offset
        if length > longest:
            raise ValueError(
                f"Learned positions end after {longest} tokens (`max_position_embeddings`), "
                f"got a sequence of {length}. Cut it, or train a model with more positions, or "
                "with sinusoidal ones, which have no end."
            )


POSITIONS = {
    "sinusoidal": SinusoidalPositions,
    "sinusoidal_concatenated": SinusoidalPositions,
    "learned": LearnedPositions,
}
