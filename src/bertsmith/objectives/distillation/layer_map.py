"""Which of the teacher's layers each of the student's is to be like."""

from typing import Literal

from bertsmith.errors import InputError

LayerMap = Literal["uniform", "skip", "last"] | tuple[int, ...]
"""A rule, or for each layer of the student the number of the teacher's, from 1.

"uniform": layer m is like m · L_T / L_S, rounded down (Jiao et al. 2020). "skip": every ⌊L_T / L_S⌋-th layer, the last
like the last (Sun et al. 2019, PKD-Skip). "last": the topmost layers (PKD-Last).
"""


def counterparts(layer_map: LayerMap, student: int, teacher: int) -> tuple[int, ...]:
    """For each state of a student of so many layers, embedding first, that of its teacher; raises InputError.

    >>> counterparts("uniform", 4, 12)
    (0, 3, 6, 9, 12)
    >>> counterparts("last", 6, 12)
    (0, 7, 8, 9, 10, 11, 12)
    """
    if isinstance(layer_map, tuple):
        if len(layer_map) != student or not all(1 <= number <= teacher for number in layer_map):
            raise InputError(
                f"distillation.layers is {list(layer_map)}; allowed: a number from 1 to {teacher} for each of the "
                f"student's {student} layers"
            )
        return (0, *layer_map)
    if student > teacher:
        raise InputError(
            f"the student has {student} layers and its teacher {teacher}; allowed: as many or fewer, or "
            "distillation.layers as a list"
        )
    if layer_map == "last":
        return (0, *range(teacher - student + 1, teacher + 1))
    if layer_map == "skip":
        return (*(number * (teacher // student) for number in range(student)), teacher)
    return tuple(number * teacher // student for number in range(student + 1))
