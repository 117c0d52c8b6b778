"""Imported by fork servers before they fork: each child ends with the process that started the fork server.

A child begins with seconds of imports, before any code of its own could watch that process.
"""

import os
from functools import partial

from bertsmith.data.parent import exit_with_parent

os.register_at_fork(after_in_child=partial(exit_with_parent, os.getppid()))
