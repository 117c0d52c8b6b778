"""One function per command: the command line, recipes and Python call it alike."""
