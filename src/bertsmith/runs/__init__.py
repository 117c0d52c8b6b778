"""One function per command, for both `bertsmith NAME` and `bertsmith.NAME(...)`."""
