"""Best-fit packing: sequences of mixed lengths → bins of one size with hardly a gap."""

from bisect import bisect_left, insort

import numpy as np

from bertsmith.errors import InputError


def pack(lengths: np.ndarray, capacity: int, most: int, *, open_bins: int = 16) -> list[np.ndarray]:
    """The indices of the sequences in each bin, bins in the order they were closed.

    Each sequence, in the order given, goes to the open bin with the least room that suffices; a bin holds at most
    `most` sequences. When too many bins are open the fullest is closed.
    """
    if len(lengths) and int(lengths.max()) > capacity:
        raise InputError(f"a sequence of {int(lengths.max())} tokens does not fit a micro-batch of {capacity} tokens")
    closed: list[np.ndarray] = []
    members: dict[int, list[int]] = {}
    rooms: list[tuple[int, int]] = []  # (room, bin), least room first
    fresh = 0
    for index, length in enumerate(lengths.tolist()):
        found = bisect_left(rooms, (length, -1))
        if found == len(rooms):
            room, number = capacity, fresh
            members[number] = []
            fresh += 1
        else:
            room, number = rooms.pop(found)
        members[number].append(index)
        room -= length
        if room == 0 or len(members[number]) == most:
            closed.append(np.array(members.pop(number)))
        else:
            insort(rooms, (room, number))
        if len(rooms) > open_bins:
            closed.append(np.array(members.pop(rooms.pop(0)[1])))
    return closed + [np.array(members[number]) for _, number in rooms]
