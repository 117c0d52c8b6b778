"""HTML reports and PNG pictures; every page is one self-contained file."""
