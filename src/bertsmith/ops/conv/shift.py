"""The neighbours of every token, as whole tensors: what convolutions are sums of."""

from torch import Tensor
from torch.nn.functional import pad

from bertsmith.data.layout import SequenceLayout


def shifted(hidden: Tensor, by: int, layout: SequenceLayout) -> Tensor:
    """The states of the tokens `by` places further on in the same sequence, zeros where there is none.

    Shape: hidden (batch, length, …) or (tokens, …), and so is the result.
    """
    if by == 0 and layout.is_token is None:
        return hidden
    if layout.are_rows:
        return _moved(layout.pad(hidden)[0], by, 1).flatten(0, 1)
    axis = 0 if layout.is_packed else 1
    moved = _moved(hidden, by, axis)
    is_inside = _is_inside(hidden, by, layout)
    if is_inside is None:
        return moved
    return moved * is_inside.reshape(is_inside.shape + (1,) * (hidden.dim() - is_inside.dim()))


def _moved(hidden: Tensor, by: int, axis: int) -> Tensor:
    """The tensor moved along an axis, zeros at the end that was left."""
    # zeros first, then the cut: no question about the length, so that one export serves all of them
    edges = [0, 0] * (hidden.dim() - 1 - axis) + ([-by, 0] if by < 0 else [0, by])
    return pad(hidden, edges).narrow(axis, max(by, 0), hidden.shape[axis])


def _is_inside(hidden: Tensor, by: int, layout: SequenceLayout) -> Tensor | None:
    """True where the neighbour is a token of the same sequence; None where it always is or was filled with zeros."""
    if layout.is_packed:
        place = layout.positions(hidden) + by
        return (place >= 0) & (place < layout.lengths()[layout.sequence_index(hidden)])
    if layout.is_token is None:
        return None
    return _moved(layout.is_token, by, 1)
