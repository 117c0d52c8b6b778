"""How each kind of task is asked and answered: rows to sequences, scores to answers. Shared with what learns them."""
