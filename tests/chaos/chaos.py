"""Run the fault trial and print its figures: `python tests/chaos/chaos.py --kills 300 --mutations 5000`.

Processes of a data loader import this file first, so it imports the trial only when it is run.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is imported; threads do not survive a fork
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.path[:0] = [str(Path(__file__).parents[1] / "faults")]
    from trial import main

    main()
